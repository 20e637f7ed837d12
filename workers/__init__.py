"""Behind the house: turns rows into rows. Each station is one arrow."""
