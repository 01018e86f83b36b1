"""dev/build_corpus.py: packages that the tests make -> text, corpus, tokens; an apt that the tests make."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, assert_one_line_error

sys.path.insert(0, str(ROOT / "dev"))
import build_corpus
import prepro_text

needs_debian = pytest.mark.skipif(not shutil.which("dpkg-deb") or not shutil.which("groff"),
                                  reason="dpkg-deb or groff is not there")
PROSE = ("The corpus is made from the packages that are there, and each of the documents is written once. "
         "If a page has been seen before, it is left out, and that is the end of it for this and for the others.\n\n")
PAGE = """<html><head><title>Not this</title><style>p { }</style></head><body>
<div class="related" id="top"><div>Previous</div><ul><li>Next</li></ul></div><div class="frame">My project</div>
<h1>Of whales<a class="headerlink" href="#x">&para;</a></h1>
<p>The <b>whale</b> is
not a fish &amp; it is large.</p><script>if (a < b) { c(); }</script>
<ul><li>one</li><li><p>two</p></li></ul><dl><dt>whale</dt><dd>a mammal</dd></dl>
<pre>
def dive(depth):

    return -depth
</pre><table><tr><th>name</th><th>size</th></tr><tr><td>blue</td><td>30 m</td></tr></table>last<br>words
<nav>Home</nav></body></html>"""
TEXT = """My project

Of whales

The whale is not a fish & it is large.

- one

- two

whale
    a mammal

def dive(depth):

    return -depth

name | size
blue | 30 m

last
words"""


def prose(name, paragraphs=3):
    """English whose paragraphs no other name has."""
    return "".join(PROSE.replace("packages", f"packages of {name} {i}") for i in range(paragraphs))


def page(text):
    return f"<html><body><p>My project</p><p>{text.strip().replace(chr(10) * 2, '</p><p>')}</p></body></html>".encode()


def make_deb(directory, name, version, files):
    """A package with {path: bytes}; returns its path."""
    tree = directory / f"{name}-{version}"
    control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    for path, data in {"DEBIAN/control": control.encode(), **files}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    path = directory / "debs" / f"{name}_{version.replace(':', '%3a')}_all.deb"
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["dpkg-deb", "-Znone", "--build", tree, path], check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture
def debs(tmp_path, monkeypatch):
    """A directory of three packages, which are what PARTS lists."""
    monkeypatch.setattr(build_corpus, "PARTS", (
        build_corpus.Part("manuals", "html", "whale-[0-9]*-doc none-doc"),
        build_corpus.Part("man pages", "man", "tools"),
        build_corpus.Part("code", "python", "python3-dive")))
    monkeypatch.chdir(tmp_path)
    german = "Der Wal ist kein Fisch, sondern ein Tier, das im Meer lebt und groß werden kann, wie man weiß. " * 9
    html = "usr/share/doc/whale/html"
    make_deb(tmp_path, "whale-9-doc", "9.1", {f"{html}/old.html": page(prose("old"))})
    make_deb(tmp_path, "whale-10-doc", "1:10.2", {
        f"{html}/a.html": page(prose("a")), f"{html}/b.html.gz": gzip.compress(page(prose("b"))),
        f"{html}/copy.html": page(prose("a")), f"{html}/partly.html": page(prose("c") + prose("a", 1)),
        f"{html}/e.html": page(prose("e")), f"{html}/german.html": page(german), f"{html}/f.de.html": page(prose("f")),
        f"{html}/latin.html": page(prose("caf\xe9")).decode().encode("latin-1"), f"{html}/short.html": page("Of it."),
        f"{html}/cut.html.gz": gzip.compress(page(prose("g")))[:99], f"{html}/genindex.html": page(prose("h")),
        f"{html}/figure.png": b"\x89PNG", "usr/share/doc/whale/notes.txt": prose("i").encode()})
    man = ".TH DIVE 1\n.SH NAME\ndive \\- go down\n.SH DESCRIPTION\n.PP\n" + prose("dive").replace("\n\n", "\n.PP\n")
    make_deb(tmp_path, "tools", "3", {
        "usr/share/man/man1/dive.1.gz": gzip.compress(man.encode()), "usr/share/man/man1/alias.1": b".so man1/dive.1\n",
        "usr/share/man/de/man1/dive.1": man.encode()})
    code = ('def dive(depth):\n    """Go down to that depth, or as far as the rope is long."""\n'
            + "    if depth or not rope:\n        return depth\n" * 9)
    make_deb(tmp_path, "python3-dive", "0.1", {
        "usr/lib/dive.py": code.encode(), "usr/lib/junk.py": bytes(range(256)) * 9,
        "usr/lib/tests/x.py": code.encode()})
    return tmp_path / "debs"


def corpus(output):
    return [json.loads(line) for line in (output / "corpus.jsonl").read_text().splitlines()]


@needs_debian
def test_packages_become_a_corpus(tmp_path, debs, run_here, vocabulary_here):
    """What is kept and what is left out; the same bytes twice; the tokens of each part."""
    output = tmp_path / "out"
    done = run_here(build_corpus, "--debs", debs, "--output", output, "--processes", 1)
    assert done.stdout.startswith("not there, left out: none-doc\nSaved 7 documents, ")
    manuals, man, code = manifest = json.loads((output / "manifest.json").read_text())["packages"]
    assert [(package["package"], package["version"], package["documents"]) for package in manifest] == [
        ("whale-10-doc", "1:10.2", 5), ("tools", "3", 1), ("python3-dive", "0.1", 1)]
    assert manuals["left_out"] == {"not English": 1, "not text": 1, "seen before": 1, "short": 1}
    assert man["left_out"] == {"short": 1} and code["left_out"] == {"not text": 1}

    texts = {number: {document["text"] for document in corpus(output) if document["package"] == number}
             for number in range(3)}
    names = ("a", "b", "c", "e", "caf\xe9")
    assert {text.strip() for text in texts[0]} == {prose(name).strip() for name in names}, "no frame, no repeats"
    (page_of_man,), (source,) = texts[1], texts[2]
    assert page_of_man.startswith("NAME\n       dive - go down\n")
    assert f"\n       {prose('dive', 1).strip()}\n" in page_of_man, "a paragraph is a line"
    assert source.startswith("def dive(depth):\n    \"\"\"Go down") and source.endswith("        return depth\n")
    assert [package["bytes"] for package in manifest] == [
        sum(len(text.encode()) for text in texts[number]) for number in range(3)]

    before = (output / "corpus.jsonl").read_bytes(), (output / "manifest.json").read_bytes()
    run_here(build_corpus, "--debs", debs, "--output", output, "--processes", 1)
    assert before == ((output / "corpus.jsonl").read_bytes(), (output / "manifest.json").read_bytes())

    run_here(prepro_text, output / "corpus.jsonl", "--output", output / "corpus", "--shard_tokens", 300)
    table = run_here(build_corpus, "--output", output, "--tokens").stdout
    tokens = [package["tokens"] for package in json.loads((output / "manifest.json").read_text())["packages"]]
    encoding = prepro_text.load_encoding("gpt2")
    assert tokens == [sum(1 + len(encoding.encode(text)) for text in texts[number]) for number in range(3)]
    assert "| manuals | whale-10-doc 1:10.2 | 5 |" in table and "| all | 3 | 7 |" in table

    os.unlink(output / "corpus_train_000001.bin")
    done = run_here(build_corpus, "--output", output, "--tokens", check=False)
    assert_one_line_error(done, output, "documents in", "expected the 7", "prepro_text.py")


@needs_debian
def test_packages_are_downloaded_once(tmp_path, debs, run_here, monkeypatch):
    """By apt-get, if their SHA-256 is not apt's; a download that fails is a line."""
    known = []
    for name, version in (("whale-10-doc", "1:10.2"), ("tools", "3")):
        (path,) = debs.glob(f"{name}_*")
        known.append(f"Package: {name}\nVersion: {version}\nArchitecture: all\nSize: {path.stat().st_size}\n"
                     f"SHA256: {build_corpus.file_hash(path, 'sha256')}\nDescription: x\n")
    (tmp_path / "show").write_text("\n".join(known))
    (tmp_path / "bin").mkdir()
    scripts = {
        "apt-cache": f"[ $1 = show ] && exec cat {tmp_path}/show; echo whale-9-doc whale-10-doc tools virtual",
        "apt-get": f"echo apt-get $*; shift; for name; do cp {debs}/${{name%=*}}_* . || exit 100; done",
    }
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")

    def build(check=True):
        return run_here(build_corpus, "--output", tmp_path / "out", "--processes", 1, check=check)

    done = build()
    assert "2 packages, 2 to download" in done.stdout
    assert "apt-get download whale-10-doc=1:10.2 tools=3\nnot there, left out: none-doc, python3-dive\n" in done.stdout
    before = (tmp_path / "out" / "corpus.jsonl").read_bytes()
    assert "2 packages, 0 to download" in build().stdout
    (tmp_path / "out" / "debs" / "tools_3_all.deb").write_bytes(b"cut short")
    assert "apt-get download tools=3\n" in build().stdout
    assert (tmp_path / "out" / "corpus.jsonl").read_bytes() == before
    shutil.rmtree(tmp_path / "out")
    os.unlink(debs / "tools_3_all.deb")
    done = build(check=False)
    done.stderr = done.stderr.splitlines()[-1]
    assert_one_line_error(done, "apt-get download failed", "apt-get update")
    assert not (tmp_path / "out" / "corpus.jsonl").exists()


@needs_debian
def test_packages_that_are_refused(tmp_path, debs, run_here):
    def fails(directory, *words):
        done = run_here(build_corpus, "--debs", directory, "--output", tmp_path / "out", "--processes", 1, check=False)
        done.stderr = done.stderr.splitlines()[-1]
        assert_one_line_error(done, *words)
        assert not list((tmp_path / "out").glob("*.json*"))

    fails(tmp_path / "none", "none", "has none of the packages")
    shutil.copy(debs / "tools_3_all.deb", debs / "tools_4_all.deb")
    fails(debs, "tools_4_all.deb", "tools_3_all.deb", "remove one")
    os.unlink(debs / "tools_4_all.deb")
    (debs / "tools_3_all.deb").write_bytes(b"no package")
    fails(debs, "tools_3_all.deb", "cannot be unpacked")


def test_pages_become_text():
    assert build_corpus.html_text(PAGE) == TEXT
    old = "<HTML><HEAD><TITLE>x</TITLE><BODY><P>One<P>Two &lt; three<div class=nav>Home"
    assert build_corpus.html_text(old) == "One\n\nTwo < three"
    info = ("Preamble\n\x1f\nFile: x.info,  Node: Top\n\nWhales\n******\n\n* Menu:\n\n* Blue::\n"
            "\x1f\nFile: x.info,  Node: Blue\n\nThe \0\b[index\0\b]blue one.\n\x1f\nTag Table:\nNode: Top\n")
    assert build_corpus.info_text(info) == "Whales\n******\n\nThe blue one.\n"


def test_a_long_text_is_cut_between_paragraphs(monkeypatch):
    monkeypatch.setattr(build_corpus, "DOCUMENT", 500)
    text = prose("x", 5).strip() + "\n"
    pieces = build_corpus.cut(text)
    assert len(pieces) > 2 and "\n".join(pieces) == text and max(map(len, pieces)) <= 500 + 2


def test_a_large_package_is_limited(monkeypatch):
    """To the documents whose hashes come first, whatever the order of its files."""
    monkeypatch.setattr(build_corpus, "LIMIT", 5000)
    texts = [prose(name) for name in "abcdefghijklmnop"]
    found = [build_corpus.documents(order, set(), build_corpus.collections.Counter()) for order in (texts, texts[::-1])]
    assert found[0] == found[1] and 4000 < sum(map(len, found[0].values())) <= 5000
