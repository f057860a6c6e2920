"""The tables of a model as its state dicts and TorchRec's checkpoints have them: names, columns, parts."""
