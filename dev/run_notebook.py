"""
Run doc/first_run.ipynb and store what it prints and shows in it. Needs: pip install -r requirements-test.txt

    python dev/run_notebook.py                  # two minutes; FIRST_RUN_TEXT=my.txt FIRST_RUN_STEPS=50 change the run
"""

import argparse
import os

from root import ROOT
from llmc.errors import UserError, import_package, run_main
from llmc.files import replacing

PAGE = os.path.join(ROOT, "doc", "first_run.ipynb")


def execute(path):
    """Run a notebook with this Python in its directory; return its text with outputs. Raises UserError with a cell's
    error."""
    nbclient, nbformat = (import_package(name, "a notebook") for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": os.path.dirname(path)}}
    client = nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", record_timing=False,
                                     coalesce_streams=True, resources=resources)
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise UserError(f"{path}: {error}") from None
    notebook.metadata.language_info = {"name": "python"}
    return nbformat.writes(notebook) + "\n"


def main():
    argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0]).parse_args()
    executed = execute(PAGE)
    with replacing(PAGE) as f:
        f.write(executed.encode())
    print(f"wrote {os.path.relpath(PAGE)}")


if __name__ == "__main__":
    run_main(main)
