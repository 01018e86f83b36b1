"""
How large the house is: lines by folder, and what a CPU run and a GPU run import.

    python dev/lines.py
"""

import ast
import os
import subprocess

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
FOLDERS = {  # what: files, as git's patterns
    "pages": ["train_*.py"],
    "programs": [":(glob)*.py", ":!train_*.py"],
    "llmc/": ["llmc/*.py", ":!llmc/gpu"],
    "llmc/gpu/": ["llmc/gpu/*.py"],
    "kernels/": ["kernels"],
    "tests/": ["tests/*.py"],
    "look/": ["look"],
    "dev/": ["dev/*.py", "dev/*.cu", "dev/*.cuh", "dev/*.md"],
    "doc/": ["doc/*.md"],
}


def files(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True,
                            text=True, check=True)
    return listed.stdout.split()


def count(path):
    with open(os.path.join(ROOT, path), "rb") as f:
        return sum(1 for _ in f)


def imports(path, everywhere=False):
    """The project's files that a file imports when it is loaded; everywhere: within functions,
    too."""
    with open(os.path.join(ROOT, path), "rb") as f:
        tree = ast.parse(f.read())
    names = {name for node in (ast.walk(tree) if everywhere else tree.body) for name in (
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else
        [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.ImportFrom)
        else [])}
    names |= {name.rpartition(".")[0] for name in names if "." in name}
    # in which Python looks, or pytest
    folders = os.path.dirname(path), "", "dev", "tests", "exercises"
    found = ([name for folder in folders for end in (".py", "/__init__.py")
              if os.path.exists(os.path.join(ROOT,
                                             name := os.path.join(folder,
                                                                  module.replace(".", "/") + end)))]
             for module in names)
    return sorted({paths[0] for paths in found if paths})


def closure(path):
    """All files that a program loads: itself, what it imports, what these import."""
    loaded = set()
    left = [path]
    while left:
        if (path := left.pop()) not in loaded:
            loaded.add(path)
            left += imports(path)
    return sorted(loaded)


def main():
    for what, patterns in FOLDERS.items():
        print(f"{what:<20} {sum(map(count, files(*patterns))):>6} lines")
    for program in ("train_gpt2.py", "train_gpt2_cuda.py"):
        loaded = closure(program)
        print(f"\n{program} loads {sum(map(count, loaded))} lines in {len(loaded)} files:\n "
              f" {' '.join(loaded)}")


if __name__ == "__main__":
    main()
