"""What a run on more than one GPU uses, and no other: see llmc/gpu/__init__.py."""
