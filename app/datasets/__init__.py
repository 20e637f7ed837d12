"""Exchange: what was said and judged leaves as Parquet; prompts and preferences come in as datasets."""
