"""What every process stands on: memory, compiled kernels, the life of a process, checks of arguments."""
