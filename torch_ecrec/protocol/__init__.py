"""What processes say to each other, and the rules that follow from it. Pure: no threads, clocks or sockets."""
