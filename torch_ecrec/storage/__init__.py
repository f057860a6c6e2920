"""Checkpoints of the whole cluster where they are kept: written, found, checked, read.

    location      bytes at any URL, durable and whole, or an error that says what to do
    parts         one file: records of one slot, row by row, and parts of the dense model; every block with its hash
    manifest      what a checkpoint is: one small file, written last
    catalog       all checkpoints at a URL: newest, chains, retention, what interrupted ones left
    chain_reader  every row of a chain once, with its newest value
    exporting     the tables as a file of safetensors
    policy        whether the next one is full

A checkpoint is a folder, which is its name. Nothing here depends on where rows were placed: they are named by table
group and row, so that any number of slots and any code can read them. Knows no servers, no coordinator and no messages.
"""
