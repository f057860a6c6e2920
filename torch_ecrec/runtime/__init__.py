"""The foundation of every process: memory, compiled kernels, its start and end, checks of arguments."""
