"""What the demonstration needs beside the library: click logs to train on."""
