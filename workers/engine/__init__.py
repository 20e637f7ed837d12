"""One SGLang replica: how it is started, watched, and furnished with versions before it takes traffic."""
