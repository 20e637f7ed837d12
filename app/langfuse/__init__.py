"""The intake of Langfuse's scores: feedback of clients that send it to Langfuse, by their configuration alone."""
