"""What an update and an engine need, in bytes and seconds, before anything is started. Torch-free."""
