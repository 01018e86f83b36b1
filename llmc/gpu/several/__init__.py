"""What only a run on more than one GPU uses: see llmc/gpu/__init__.py."""
