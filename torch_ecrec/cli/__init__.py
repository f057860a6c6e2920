"""The command line: a file for each command. `main` parses the arguments and runs one of them.

    HELP                        a line for `torch-ecrec --help`
    add_arguments(parser)       what may follow the command's name
    run(arguments) -> int       the exit code

Importing any of these is quick: what takes seconds to load (torch, TorchRec, Numba) is imported by `run`, or by what it
calls, so that `--help` and `status` answer at once, and a server that is told to end while it starts does so.
"""
