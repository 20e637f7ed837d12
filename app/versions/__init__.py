"""A version's files, for engines that do not see the trainer's storage."""
