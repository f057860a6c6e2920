"""For tests on networks that fail, and for chaos and benchmarks that need them.

hosts         several hosts on one machine, with links that are cut, slow or lossy, and hosts that die
host_init     the first process of such a host
entered       a module that is run on one
"""
