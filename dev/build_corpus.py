"""
English and code from Debian's packages -> a corpus to train on: books, manuals, man pages, dictionaries, source code.

    python dev/build_corpus.py                    # downloads what PARTS lists; no root, nothing is installed
    python prepro_text.py data/corpus/corpus.jsonl --output data/corpus/corpus --format uint16 \\
        --val_fraction 0.01 --shard_tokens 10000000
    python dev/build_corpus.py --tokens           # prints the tokens of each part, as in doc/long_run.md
    python train_gpt2_cuda.py -e d12 -i "data/corpus/corpus_train_*.bin"

Needs Debian or Ubuntu, with apt's lists (apt-get update) and groff. HTML, man pages, Info and dictionaries become plain
text. Left out are translations, pages that only list names, files that are not text, and repeated paragraphs. Texts
longer than DOCUMENT characters are cut into several documents; a package gives at most LIMIT characters.

corpus.jsonl has one document per line, sorted by hash, so that any stretch of it has some of everything; manifest.json
lists the packages with their SHA-256. The same packages give the same bytes: keep data/corpus/debs, and --debs
data/corpus/debs rebuilds the corpus without apt.
"""

import os
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (first: Ctrl-C is quiet from here on, and OpenBLAS is told how to run)

import argparse
import codecs
import collections
import fnmatch
import gzip
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import tarfile
import zlib
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from llmc.dataloader import find_files, open_tokens
from llmc.errors import UserError, run_main
from llmc.files import make_directory, open_input, replacing
from prepro import add_processes, check_processes, file_hash, in_processes
from readme import put_between_markers, split_at_markers

PAGE = os.path.join(ROOT, "doc", "long_run.md")
DOCUMENT = 100_000  # characters
LIMIT = 6_000_000  # characters per package, at most
SHORT = 400  # characters: shorter documents are left out
REPEATED = 80  # characters: paragraphs at least this long are kept only once


class Part(NamedTuple):
    name: str
    files: str  # a key of FILES
    packages: str  # names; a pattern matches the version in one


PARTS = (
    Part("books", "html", "anarchism c++-annotations-html debian-faq debian-handbook debian-history"
         " debian-kernel-handbook debian-policy debian-reference-en debmake-doc developers-reference haskell98-report"
         " live-manual-html maint-guide mh-book"),
    Part("dictionaries, fortunes", "text", "dict-devil dict-foldoc dict-gcide dict-jargon fortunes fortunes-min"),
    Part("systems and servers", "html", "apache2-doc aptitude-doc-en bash-doc bind9-doc borgbackup-doc exim4-doc-html"
         " frr-doc git-doc haproxy-doc kitty-doc krb5-doc libreoffice-help-en-us linux-doc-[0-9]* nova-doc nut-doc"
         " postfix-doc postgis-doc postgresql-doc-[0-9]* qemu-system-common shorewall-doc slurm-wlm-doc sqlite3-doc"
         " swift-doc systemtap-doc varnish-doc xapian-doc zsh-doc"),
    Part("programming", "html", "autoconf-doc clang-[0-9]*-doc cmake-doc freetype2-doc gettext-doc libboost1.*-doc"
         " libglib2.0-doc llvm-[0-9]*-doc nodejs-doc python-celery-doc python-django-doc python-flask-doc"
         " python-sqlalchemy-doc python-tornado-doc python3.*-doc rust-web-doc scons-doc sphinx-doc swi-prolog-doc"
         " swig4.*-doc"),
    Part("science and the arts", "html", "festival-doc ffmpeg-doc gap-doc gmsh-doc gnuplot-doc groff"
         " lilypond-doc-html mame-doc maxima-doc netcdf-doc ngspice-doc octave-doc povray-doc r-doc-html snd-doc"),
    Part("man pages", "man", "coreutils erlang-manpages freebsd-manpages libssl-doc manpages manpages-dev netpbm"
         " openssh-client openssl perl-doc systemd tcl8.6-doc tk8.6-doc util-linux"),
    Part("Info and plain text", "text", "binutils-doc coreutils doc-debian docker-doc vim-runtime"),
    Part("Python's library", "python", "libpython3.*-minimal libpython3.*-stdlib"),
    Part("Python packages", "python", "python3-aiohttp python3-django python3-docutils python3-flask python3-ipython"
         " python3-jinja2 python3-networkx python3-nltk python3-numpy python3-pygments python3-requests"
         " python3-setuptools python3-sphinx python3-sqlalchemy python3-tornado python3-twisted python3-werkzeug"),
)
FILES = {  # kind of part -> what the paths of its files match
    "html": re.compile(r"\.x?html?(\.gz)?$"),
    "man": re.compile(r"/man/man\d"),
    "text": re.compile(r"\.(txt|md|rst|dict\.dz)(\.gz)?$|\.info(-\d+)?\.gz$|/fortunes/[^.]+$"),
    "python": re.compile(r"\.py$"),
}
SKIPPED = re.compile(  # legal notices, lists of changes and of names, generated pages, tests
    r"/(copyright|changelog|NEWS|RelNotes|COPYING|LICENSE|README\.Debian)"
    r"|/(_sources|_static|_modules|tests?|locale|javadoc|doxygen)/"
    r"|/(genindex|py-modindex|search|annotated|hierarchy|globals|namespacemembers|functions_)[^/]*\.html|/all\.html"
    r"|/(struct|fn|trait|enum|macro|constant|type|union|primitive|keyword|static)\.[^/]*\.html", re.IGNORECASE)
LANGUAGES = ("ar bg bn bs ca cs da de el eo es et eu fa fi fr ga gl gu he hi hr hu id is it ja ka kk kn ko lt lv mk ml"
             " mr nb nl nn no pa pl pt ro ru sk sl sq sr sv ta te th tr uk uz vi zh").split()
TRANSLATED = re.compile(rf"/translations/|[/.]({'|'.join(LANGUAGES)})([-_@]\w+)?[/.]", re.IGNORECASE)
ENGLISH = frozenset("the of and to that this with from are not if or for be by is".split())
EOT = 50256  # GPT-2's end of text

# ----------------------------------------------------------------------------------------------------------------------
# packages


def packages_in(directory):
    """Return {package: path} of the .deb files in a directory; raises UserError if a package has two versions."""
    paths = {}
    for path in find_files(os.path.join(directory, "*.deb")):
        name = os.path.basename(path).partition("_")[0]
        if name in paths:
            raise UserError(f"{path}: there is {paths[name]}, too: expected one version of a package; remove one")
        paths[name] = path
    return paths


def choose(names):
    """Choose the packages of PARTS among `names`, the newest of several versions: ([(part, package)], not found)."""
    chosen, missing = [], []
    for part in PARTS:
        for wanted in part.packages.split():
            found = fnmatch.filter(names, wanted)
            if found:
                chosen.append((part, max(found, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])))
            else:
                missing.append(wanted)
    return chosen, missing


def fetch(directory):
    """Download the packages of PARTS into a directory, except those already there; returns {package: .deb file}."""
    names = sorted({name for _, name in choose(output_of("apt-cache", "pkgnames").split())[0]})
    found = output_of("apt-cache", "show", "--no-all-versions", *names) if names else ""
    paths, wanted = {}, {}
    make_directory(directory)
    for record in found.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Size|SHA256): (.+)$", record, re.MULTILINE))
        if not fields:
            continue
        name, version = fields["Package"], fields["Version"]
        paths[name] = os.path.join(directory, f"{name}_{version.replace(':', '%3a')}_{fields['Architecture']}.deb")
        if not (os.path.exists(paths[name]) and file_hash(paths[name], "sha256") == fields["SHA256"]):
            wanted[f"{name}={version}"] = int(fields["Size"])
    print(f"{len(paths)} packages, {len(wanted)} to download, {sum(wanted.values()) / 1e6:.0f} MB")
    if wanted and subprocess.run(["apt-get", "download", *wanted], cwd=directory).returncode:
        raise UserError("apt-get download failed: run apt-get update, then the same command once more")
    return paths


def output_of(*command, **options):
    """Return what a command prints; raises UserError if it fails or is not installed."""
    try:
        return subprocess.run(command, check=True, capture_output=True, **options).stdout.decode(errors="replace")
    except FileNotFoundError:
        raise UserError(f"{command[0]}: not found: this needs Debian or Ubuntu, with groff installed") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {error.returncode}"]
        raise UserError(f"{' '.join(command[:3])}: {said[-1]}") from None


def files_of(deb, names):
    """Yield (path, bytes) of the files in a package that match `names`, and neither SKIPPED nor TRANSLATED."""
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process, process.stdout:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as files:
                for file in files:
                    path = file.name.removeprefix(".")
                    if (file.isfile() and names.search(path) and not SKIPPED.search(path)
                            and not TRANSLATED.search(path)):
                        yield path, files.extractfile(file).read()
            process.stdout.read()  # the padding at the end
            if process.wait():
                raise tarfile.ReadError(f"dpkg-deb ended with status {process.returncode}")
        except tarfile.TarError as error:
            raise UserError(f"{deb}: cannot be unpacked ({error}): remove it, and run this again") from None


# ----------------------------------------------------------------------------------------------------------------------
# files -> plain text


class HTMLText(html.parser.HTMLParser):
    """Extracts the text of a page: a paragraph per line, empty lines in between; preformatted text stays as it is."""

    ALONE = frozenset("address article blockquote body caption center div dl fieldset figure h1 h2 h3 h4 h5 h6 hr html"
                      " main ol p pre section table ul".split())
    LINES = frozenset("br dd dt li tr".split())  # tags that begin a line
    STARTS = {"li": "- ", "dd": "    "}
    HIDDEN = frozenset("button footer form head nav noscript script select style svg template textarea".split())
    FRAME = frozenset("breadcrumb breadcrumbs footer header headerlink linenos nav nav-panel navbar navfooter navheader"
                      " navigation noprint related sidebar sphinxsidebar toc".split())  # classes around the text
    FRAMED = frozenset("a aside div header section span table td tr ul".split())  # tags that pages always close

    def __init__(self):
        super().__init__()
        self.text, self.buffer, self.start, self.gap = [], [], "", 0
        self.hidden, self.depth, self.preformatted = None, 0, 0

    def handle_starttag(self, tag, attributes):
        if tag == "body":
            self.hidden = None  # old pages do not close their head
        if self.hidden:
            self.depth += tag == self.hidden
            return
        attributes = dict(attributes)
        marks = f"{attributes.get('class')} {attributes.get('id')} {attributes.get('role')}".lower().split()
        if tag in self.HIDDEN or tag in self.FRAMED and not self.FRAME.isdisjoint(marks):
            self.hidden, self.depth = tag, 1
        elif tag in self.ALONE or tag in self.LINES:
            self.end_paragraph(tag)
            self.start = self.STARTS.get(tag, self.start)
            self.preformatted += tag == "pre"
        elif tag in ("td", "th") and any(map(str.strip, self.buffer)):
            self.buffer.append(" | ")

    def handle_endtag(self, tag):
        if self.hidden:
            self.depth -= tag == self.hidden
            if not self.depth:
                self.hidden = None
        elif tag in self.ALONE or tag in self.LINES:
            self.end_paragraph(tag)
            self.preformatted -= tag == "pre" and self.preformatted > 0

    def handle_data(self, data):
        if not self.hidden:
            self.buffer.append(data)

    def end_paragraph(self, tag):
        lines = "".join(self.buffer)
        lines = lines.strip("\n").rstrip() if self.preformatted else " ".join(lines.split()).rstrip(" |")
        self.buffer = []
        if lines:
            self.text.append("\n" * self.gap + self.start + lines)
            self.start, self.gap = "", 0
        self.gap = max(self.gap, 1 + (tag in self.ALONE))


def html_text(data):
    parser = HTMLText()
    parser.feed(data)
    parser.close()
    parser.end_paragraph("html")
    return "".join(parser.text).strip("\n").replace("\u00b6", "").replace("\u00a0", " ")


def man_text(data):
    """Return a man page as groff prints it, a paragraph per line, without the page's first and last lines."""
    if data.startswith(".so "):
        return ""  # an alias of another page
    command = "groff -Kutf8 -Tascii -P-cbou -t -mandoc -rLL=9999n -rHY=0".split()
    page = subprocess.run(command, input=data.encode(), capture_output=True).stdout.decode(errors="replace")
    page = re.sub(r"([ _=-])\1{15,}", lambda run: run[1] * 8, page)  # rules in tables fill the long lines
    return "\n".join(page.strip().split("\n")[1:-1])


def info_text(data):
    """Return the nodes of an Info file, without headers and menus."""
    nodes = [node.split("\n", 2)[-1] for node in data.split("\x1f") if node.startswith("\nFile: ")]
    text = "\n".join(re.split(r"^\* Menu:", node, flags=re.MULTILINE)[0].strip() + "\n" for node in nodes)
    return re.sub("\0\b\\[[^\0]*\0\b\\]", "", text)  # markers of indices and pictures


def decode(data):
    """Decode bytes, unzipped if need be; lines that are not UTF-8 are Windows-1252. Raises ValueError if not text, an
    error of gzip or zlib if damaged."""
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    return "\n".join(map(decode_line, data.removeprefix(codecs.BOM_UTF8).split(b"\n")))


def decode_line(line):
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("cp1252")


def plain_text(path, data):
    """Return the plain text of a file. If it is not text, raises ValueError or what gzip, zlib or HTMLParser raise."""
    text = decode(data)
    if FILES["html"].search(path):
        text = html_text(text)
    elif FILES["man"].search(path):
        text = man_text(text)
    elif ".info" in os.path.basename(path):
        text = info_text(text)
    elif "/fortunes/" in path:
        text = re.sub(r"^%$", "", text, flags=re.MULTILINE)
    if "\0" in text:
        raise ValueError("a NUL character")
    text = re.sub(r"[\x01-\x08\x0e-\x1f\x7f]", "", text)
    lines = (line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def is_english(text):
    """Whether a text has enough English (or Python) words and is not mostly tables of names or numbers."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    letters = sum(map(len, words))
    return (letters > 0.55 * sum(map(len, text.split())) and sum(word in ENGLISH for word in words) > 0.06 * len(words)
            and len(text.encode()) < 1.05 * len(text))


# ----------------------------------------------------------------------------------------------------------------------
# documents


def cut(text):
    """Split a text between paragraphs, into pieces of about DOCUMENT characters."""
    pieces, piece, size = [], [], 0
    for paragraph in text.split("\n\n"):
        if size + len(paragraph) > DOCUMENT and piece:
            pieces.append("\n\n".join(piece) + "\n")
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph)
    return [*pieces, "\n\n".join(piece)]


def read_package(job):
    """(.deb file, key of FILES) -> (the texts of its files, how many were left out for each reason)."""
    deb, files = job
    texts, left_out = [], collections.Counter()
    for path, data in files_of(deb, FILES[files]):
        try:
            text = plain_text(path, data)
        except (ValueError, AssertionError, gzip.BadGzipFile, zlib.error, EOFError):  # HTMLParser raises AssertionError
            left_out["not text"] += 1
            continue
        if len(text) < SHORT:
            left_out["short"] += 1
        elif not is_english(text):
            left_out["not English"] += 1
        else:
            texts.append(text)
    return without_frames(texts) if files == "html" else texts, left_out


def without_frames(texts):
    """Return the texts of pages without the paragraphs that many of them begin or end with."""
    pages = [text.split("\n\n") for text in texts]
    counts = collections.Counter(paragraph for page in pages for paragraph in set(page))
    frame = {paragraph for paragraph, count in counts.items() if count > max(4, len(pages) / 20)}
    return ["\n\n".join(trim(page, frame)) for page in pages]


def trim(page, frame):
    inside = [i for i, paragraph in enumerate(page) if paragraph not in frame]
    return page[inside[0] : inside[-1] + 1] if inside else []


def without_repeats(text, seen):
    """Return the text without long paragraphs whose hash is in `seen`; adds the hashes of the others to it."""
    kept = []
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if len(words) >= REPEATED:
            digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(paragraph)
    return "\n\n".join(kept)


def documents(texts, seen, left_out):
    """Return {hash: document} of a package's texts, at most LIMIT characters; counts in left_out what is not kept."""
    found, size = {}, 0
    for text in texts:
        unseen = without_repeats(text, seen)
        if len(unseen) < max(SHORT, len(text) / 2):
            left_out["seen before"] += 1
            continue
        for piece in cut(unseen):
            found[hashlib.sha256(piece.encode()).hexdigest()] = piece
    for digest in sorted(found):
        size += len(found[digest])
        if size > LIMIT:
            left_out["over the limit"] += 1
            del found[digest]
    return found


def build(paths, output, processes):
    """Write corpus.jsonl and manifest.json from {package: .deb file}."""
    chosen, missing = choose(paths)
    if missing:
        print(f"not there, left out: {', '.join(missing)}")
    jobs = [(paths[name], part.files) for part, name in chosen]
    packages, corpus, seen = [], {}, set()
    with tqdm(total=sum(os.path.getsize(path) for path, _ in jobs), unit="B", unit_scale=True, desc="reading") as bar:
        read = in_processes(read_package, jobs, processes)
        for (part, name), (path, _), (texts, left_out) in zip(chosen, jobs, read):
            new = {digest: text for digest, text in documents(texts, seen, left_out).items() if digest not in corpus}
            corpus.update((digest, (len(packages), text)) for digest, text in new.items())
            version = output_of("dpkg-deb", "-f", path, "Version").strip()
            packages.append({"part": part.name, "package": name, "version": version,
                             "sha256": file_hash(path, "sha256"), "copyright": f"/usr/share/doc/{name}/copyright",
                             "documents": len(new), "bytes": sum(len(text.encode()) for text in new.values()),
                             "left_out": dict(sorted(left_out.items()))})
            bar.update(os.path.getsize(path))
    with replacing(os.path.join(output, "corpus.jsonl")) as f:
        for digest in tqdm(sorted(corpus), unit="document", desc="writing"):
            number, text = corpus[digest]
            f.write(json.dumps({"text": text, "package": number}, ensure_ascii=False).encode() + b"\n")
    write_manifest(output, {"system": system(), "packages": packages})
    count, size = (sum(package[what] for package in packages) for what in ("documents", "bytes"))
    print(f"Saved {count} documents, {size / 1e6:.1f} MB, of {len({name for _, name in chosen})} packages to"
          f" {output}/corpus.jsonl")


def system():
    """Return the name and version of this Debian or Ubuntu."""
    with open_input("/etc/os-release", "expected Debian or Ubuntu") as f:
        return re.search(r'^PRETTY_NAME="?([^"\n]*)', f.read().decode(), re.MULTILINE)[1]


def write_manifest(output, manifest):
    with replacing(os.path.join(output, "manifest.json")) as f:
        f.write(json.dumps(manifest, indent=1).encode() + b"\n")


# ----------------------------------------------------------------------------------------------------------------------
# tokens


def count_tokens(output):
    """Return the manifest, with the number of tokens of each package.

    The shards have the documents in corpus.jsonl's order, each after an end-of-text token. Raises UserError if they are
    of another corpus.
    """
    mend = "run python dev/build_corpus.py, then prepro_text.py"
    with open_input(os.path.join(output, "manifest.json"), mend) as f:
        manifest = json.load(f)
    with open_input(os.path.join(output, "corpus.jsonl"), mend) as f:
        numbers = [json.loads(line)["package"] for line in f]
    shards = [path for split in ("train", "val") for path in find_files(os.path.join(output, f"corpus_{split}_*.bin"))]
    tokens = np.concatenate([open_tokens(path, EOT + 1) for path in shards] or [[]])
    starts = np.flatnonzero(tokens == EOT)
    if len(starts) != len(numbers):
        raise UserError(f"{output}: {len(starts)} documents in {len(shards)} shards, expected the {len(numbers)} of"
                        f" corpus.jsonl; {mend}")
    counts = np.bincount(numbers, np.diff(starts, append=len(tokens)), len(manifest["packages"]))
    for package, count in zip(manifest["packages"], counts):
        package["tokens"] = int(count)
    return manifest


def table(manifest):
    """Return a Markdown table: the packages, MB and tokens of each part."""
    parts = {}
    for package in manifest["packages"]:
        if package["documents"]:
            parts.setdefault(package["part"], []).append(package)
    lines = [f"{manifest['system']}:", "", "| part | packages | documents | MB | million tokens |",
             "|---|---|---|---|---|"]
    for name, packages in [*parts.items(), ("all", sum(parts.values(), []))]:
        names = {package["package"]: package["version"] for package in packages}
        documents, size, tokens = (sum(package[what] for package in packages)
                                   for what in ("documents", "bytes", "tokens"))
        listed = len(names) if name == "all" else ", ".join(map(" ".join, names.items()))
        lines.append(f"| {name} | {listed} | {documents} | {size / 1e6:.1f} | {tokens / 1e6:.2f} |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# main


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", metavar="DIR", default=os.path.join("data", "corpus"), help="where the corpus goes")
    parser.add_argument("--debs", metavar="DIR", default=argparse.SUPPRESS,
                        help="a directory of .deb files to take, instead of the newest that apt has")
    parser.add_argument("--tokens", action="store_true", help="count the tokens of each part, once there are shards")
    parser.add_argument("--readme", action="store_true", help="--tokens, and put the table into doc/long_run.md")
    add_processes(parser, "packages read, in processes of their own,")
    args = parser.parse_args()
    check_processes(args)
    if args.tokens or args.readme:
        if args.readme:
            split_at_markers("corpus", PAGE)
        manifest = count_tokens(args.output)
        write_manifest(args.output, manifest)
        print(table(manifest))
        if args.readme:
            put_between_markers("corpus", table(manifest), PAGE)
        return
    for program, package in (("dpkg-deb", "dpkg"), ("groff", "groff-base")):
        if not shutil.which(program):
            raise UserError(f"{program}: not found: apt-get install {package} (this needs Debian or Ubuntu)")
    debs = getattr(args, "debs", None)
    paths = fetch(os.path.join(args.output, "debs")) if debs is None else packages_in(debs)
    if not choose(paths)[0]:
        mend = "run apt-get update" if debs is None else "pass the folder of a former run's .deb files, or no --debs"
        raise UserError(f"{debs or 'apt-cache'}: has none of the packages that are wanted: {mend}")
    make_directory(args.output)
    build(paths, args.output, args.processes)


if __name__ == "__main__":
    run_main(main)
