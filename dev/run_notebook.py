"""
Run doc/first_run.ipynb and store what it prints and shows in it. Needs: pip install -r requirements-test.txt

    python dev/run_notebook.py                  # two minutes; FIRST_RUN_TEXT=my.txt FIRST_RUN_STEPS=50 change the run
"""

import argparse
import os

from root import ROOT
from llmc.errors import UserError, run_main
from llmc.files import open_input, replacing


def execute(path, directory):
    """Run a notebook with this Python in `directory`; return it with outputs. Raises UserError with a cell's error."""
    try:
        import nbclient
        import nbformat
    except ImportError as error:
        raise UserError(f"{error.name} cannot be imported: pip install -r requirements-test.txt") from None
    with open_input(path, "it comes with this project: git checkout doc/first_run.ipynb") as f:
        notebook = nbformat.reads(f.read().decode(), as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", record_timing=False,
                                     coalesce_streams=True, resources={"metadata": {"path": directory}})
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise UserError(f"{path}: {error}") from None
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("notebook", nargs="?", default=os.path.join(ROOT, "doc", "first_run.ipynb"))
    path = parser.parse_args().notebook
    notebook = execute(path, os.path.dirname(os.path.abspath(path)))
    import nbformat

    with replacing(path) as f:
        f.write(nbformat.writes(notebook).encode() + b"\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    run_main(main)
