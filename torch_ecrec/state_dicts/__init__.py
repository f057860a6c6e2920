"""A model's tables as state dicts and TorchRec's checkpoints have them: names, order of columns, parts."""
