"""The client of SGLang engines. Only this package and workers.engine, which starts engines, know SGLang."""
