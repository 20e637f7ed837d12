"""Datasets: Parquet files imported as prompts or preferences, and turns and preferences exported as Parquet."""
