"""All we know about SGLang, for those who talk to a replica; workers.engine knows how to start one."""
