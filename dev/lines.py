"""
How large the house is, and how dense: lines by folder, those beyond column 100, assignments that
pack unrelated values into a tuple, the largest files and functions, and what a CPU run and a GPU run
import.

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


COLUMNS = 100
FILE_LINES, PAGE_LINES = 450, 950
FUNCTION_LINES = 60
LARGE = ("kernels/hopper/attention.cu", "kernels/hopper/matmul_fp8.cu")  # an algorithm each: as pages


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def code_files():
    return files("*.py", "kernels", "dev/kernels/*.cu*", "look/*.js", "look/*.css")


def long_lines(path):
    """How many lines of a file end beyond COLUMNS."""
    return sum(len(line) > COLUMNS for line in read(path).splitlines())


def most_lines(path):
    """How many lines a file may have."""
    return PAGE_LINES if path.startswith("train_") or path in LARGE else FILE_LINES


def is_packed(node):
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def assignments():
    """(all assignments in Python, those of a tuple of values to a tuple of names)."""
    found = [node for path in files("*.py") for node in ast.walk(ast.parse(read(path)))
             if isinstance(node, ast.Assign)]
    return len(found), sum(map(is_packed, found))


def functions():
    """[(lines, path, name)] of all functions in Python, the longest first."""
    return sorted(((node.end_lineno - node.lineno + 1, path, node.name) for path in files("*.py")
                   for node in ast.walk(ast.parse(read(path)))
                   if isinstance(node, ast.FunctionDef)), reverse=True)


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

    beyond, lines = sum(map(long_lines, code_files())), sum(map(count, code_files()))
    total, packed = assignments()
    print(f"\n{beyond} of {lines} lines end beyond column {COLUMNS} ({beyond / lines:.1%})")
    print(f"{packed} of {total} assignments pack a tuple ({packed / total:.1%})")
    print("\nthe largest files:")
    for size, path in sorted(((count(path), path) for path in code_files()), reverse=True)[:8]:
        print(f"{size:>6} {path}")
    print("\nthe longest functions:")
    for size, path, name in functions()[:8]:
        print(f"{size:>6} {name} in {path}")

    for program in ("train_gpt2.py", "train_gpt2_cuda.py"):
        loaded = closure(program)
        print(f"\n{program} loads {sum(map(count, loaded))} lines in {len(loaded)} files:\n"
              f"  {' '.join(loaded)}")


if __name__ == "__main__":
    main()
