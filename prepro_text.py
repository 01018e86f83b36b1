"""
Your own text -> tokens: text, Markdown, code, JSON lines; files, folders, quoted globs.

    python prepro_text.py notes.md books/ --output data/mine      # prints:
        13 documents in 13 files; skipped 2 hidden names, 1 binary file, such as books/cover.jpg
        Saved 32768 tokens to data/mine_val.bin
        Saved 401133 tokens to data/mine_train.bin
        Saved the vocabulary of 50257 tokens to data/mine_tokenizer.bin
    python train_gpt2.py -e d4 -i data/mine -o runs/mine          # trains on it, from random weights

A document is a file; in JSON lines, it is the --field of a line, and in a JSON array of objects,
that of each: a file's first lines tell, not its name. An end-of-text token begins a document;
`<|endoftext|>` within a text is that token, too, and in the vocabulary of a Hugging Face folder, so
are the names of all its special tokens. Folders are read in sorted order, without hidden files and
files that are not UTF-8 text, which are named; links are followed, and each file is read once. A
tenth of the tokens is for validation (at most 32768; or --val_fraction), the rest for training, in
shards if --shard_tokens is given: whole documents from all over the text, or of a text whose
documents are too long for that, its end.

The vocabulary is GPT-2's, or `bytes`, the 256 byte values, or `chars`, the characters of the text,
as in nanoGPT's shakespeare_char, or `bpe:4096`, so many tokens made of the text, or that of a run,
to train its model on. Several processes tokenize the text in pieces of a megabyte, cut where tokens
end; it need not fit in memory.

With --chat, a line of JSON is a conversation, {"messages": [{"role": "user", "content": "Hi"},
{"role": "assistant", "content": "Hello."}]}, rendered by the chat template of the vocabulary's
folder; other vocabularies get one in which a message is a line. Whole conversations are packed into
rows of --sequence_length tokens. PREFIX_train_weights.bin says which tokens are targets: those of
answers, and what ends them. Train with -t of that length.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import argparse
import collections
import itertools
import json
import os
import re
import sys
import tempfile

import numpy as np

from llmc.chat import OURS, Template
from llmc.errors import UserError, import_package, run_main
from llmc.files import chunks, errors_of_writing, make_directory
from llmc.vocabulary import EOT, Folder, Letters, open_vocabulary
from prepro import chats, reading
from prepro.common import (add_processes, add_val_fraction, check_leftovers, check_not_written_over,
                           check_processes, evenly, in_processes, make_parser, output_paths,
                           progress_bar, save_files, training_shards, val_tokens)
from prepro.encodings import NotText
from prepro.reading import documents, find_texts

VAL_TOKENS = 32768
ROWS = 256  # of conversations to train on, at least


def prepare(lacking, *vocabulary):
    """Load the vocabulary in this process. lacking: characters that are left out of the text."""
    global VOCABULARY, LACKING
    VOCABULARY = open_vocabulary(*vocabulary)
    LACKING = dict.fromkeys(map(ord, lacking))


def lacks(vocabulary, letter):
    """Whether a vocabulary of bytes or characters cannot express a character."""
    try:
        vocabulary.encode(letter, begin=False)
    except UserError:
        return True
    return False


def make_bpe(size, texts, field, folder):
    """Write a byte-pair encoding of at most `size` tokens, made of the texts, as a Hugging Face
    folder."""
    tokenizers = import_package("tokenizers", "--vocabulary bpe:N")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    letters = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = letters(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=[EOT],
                                             initial_alphabet=letters.alphabet(),
                                             max_token_length=255, show_progress=False)
    with progress_bar(total_size(texts), "making tokens", "B") as advance:
        parts = (part for path, found in texts.items()
                 for _, text in documents(path, field, found, advance) for part in text.split(EOT))
        # a long word takes time by the square of its length
        pieces = (re.sub(r"(\S{1000})(?=\S)", r"\1 ", part) for part in parts)
        tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "generation_config.json"), "w") as f:
        json.dump({"eos_token_id": 0}, f)


def tokenize(job):
    """The tokens of a job's documents, as token_type says; their number of characters, and
    {character that no token stands for: how often}."""
    ids = []
    lengths = []
    lost = collections.Counter()
    is_folder = isinstance(VOCABULARY, Folder)  # which finds the names of its special tokens itself
    for begins, text in job:
        for part in [text] if is_folder else text.removeprefix(EOT * begins).split(EOT):
            if begins:
                ids.append(VOCABULARY.eot)
                lengths.append(0)
            begins = True

            found, of_part, lacking = VOCABULARY.measure(part.translate(LACKING) if LACKING
                                                         else part)
            ids += found
            lengths += of_part
            if found:
                # what is left out, or dropped at the end
                lengths[-1] += len(part.encode()) - sum(of_part)
            lost.update(letter for letter in lacking if not letter.isspace())

    tokens = np.empty(len(ids), token_type(VOCABULARY))
    tokens["id"] = ids
    tokens["bytes"] = lengths
    tokens["bytes"][tokens["id"] == VOCABULARY.eot] = 0  # its name in a text is no text
    return tokens, sum(len(text) for _, text in job), lost


def token_type(vocabulary):
    """The dtype of a token, and of the bytes of text that it stands for."""
    return np.dtype([("id", "uint16" if len(vocabulary.tokens) <= 1 << 16 else "int32"),
                     ("bytes", "uint32")])


def survey(paths, args, known):
    """Read everything once, so that a bad file raises UserError before any work is done.

    Returns ({path: found in a folder} of the texts, number of documents, {character: how often it
    is there}, {path: why it is no text}); characters are counted for a vocabulary of characters:
    `known`, or one that they make.
    """
    texts = {}
    count = 0
    characters = collections.Counter()
    left = {}
    counts_them = (args.vocabulary == "chars" or isinstance(known, Letters)
                   and args.vocabulary != "bytes")
    with progress_bar(total_size(paths), "reading", "B") as advance:
        for path, found in paths.items():
            if found and not os.path.isfile(path):  # a FIFO, a broken link
                left[path] = None
                continue
            seen = collections.Counter()
            begun = 0
            try:
                for begins, text in documents(path, args.field, found, advance):
                    begun += begins
                    if counts_them:
                        letters = text.replace(EOT, "")
                        seen.update(set(letters) if args.vocabulary == "chars" else letters)
            except NotText as error:
                if not found:
                    raise
                left[path] = None if error.kind == "binary" else error
                continue
            texts[path] = found
            count += begun
            characters.update(seen)
    return texts, count, characters, left


def total_size(paths):
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))


def number_of(count, thing):
    return f"{count} {thing}{'s' * (count != 1)}"


def parse_arguments():
    parser = make_parser(__doc__, os.path.join("data", "text"), format="uint16")
    parser.add_argument("inputs", nargs="+", metavar="FILE",
                        help="text, a folder of it, or a quoted glob")
    parser.add_argument("--vocabulary", default="gpt2", metavar="NAME",
                        help="gpt2; bytes: the 256 byte values; chars: the characters of the text;"
                        " bpe:N: at most N tokens made of it; the directory of a run; or a Hugging"
                        " Face folder: its tokenizer.json")
    parser.add_argument("--field", metavar="NAME", default="text",
                        help="field of a JSON object that has the text; '': JSON is read as text")
    parser.add_argument("--shard_tokens", type=int, metavar="N", default=argparse.SUPPRESS,
                        help="split the training tokens over shards, PREFIX_train_000000.bin and"
                        " on, of at most N")
    parser.add_argument("--chat", action="store_true",
                        help="JSON lines are conversations: answers are what is learned")
    parser.add_argument("--sequence_length", type=int, metavar="T", default=1024,
                        help="with --chat, tokens in a row of whole conversations: the -t of the"
                        " training")
    add_processes(parser, "pieces of text")
    add_val_fraction(parser, VAL_TOKENS, least=0.0)

    args = parser.parse_args()
    check_processes(args)
    args.shard_tokens = getattr(args, "shard_tokens", None)
    if args.shard_tokens is not None and not 0 < args.shard_tokens < 2**31:
        raise UserError(f"--shard_tokens {args.shard_tokens}: expected at least 1, and less than"
                        " 2^31")
    bpe = re.fullmatch(r"bpe:0*([1-9]\d{0,6})", args.vocabulary)
    if args.vocabulary.startswith("bpe:") and not (bpe and int(bpe[1]) >= 512):
        raise UserError(f"--vocabulary {args.vocabulary}: expected bpe:512 to bpe:9999999, such as"
                        " bpe:4096")
    args.bpe = int(bpe[1]) if bpe else 0
    if not args.chat and getattr(args, "val_fraction", 1.0) == 0.0:
        raise UserError("--val_fraction 0.0: expected more than 0 and less than 1")
    if args.chat and args.shard_tokens:
        raise UserError("--shard_tokens: not with --chat, whose rows are one file")
    if not 1 < args.sequence_length < 2**24:
        raise UserError(f"--sequence_length {args.sequence_length}: expected 2 to 2^24 - 1")
    return args


def main():
    args = parse_arguments()
    check_leftovers(args)
    if args.chat:
        return prepare_chats(args)
    paths, hidden = find_texts(args.inputs)
    is_made = args.bpe or args.vocabulary == "chars"
    known = None if is_made else open_vocabulary(args.vocabulary)  # downloads GPT-2's once
    texts, count, characters, left = survey(paths, args, known)

    shards = []
    if args.shard_tokens:
        shards = [f"{args.output}_val_000000.bin", *training_shards(args.output)]
    check_not_written_over(texts, output_paths(args.output) + shards)
    if not count:
        seen = next((f", such as {error or path}" for path, error in left.items()), "")
        raise UserError(f"{', '.join(args.inputs)}: no text in"
                        f" {number_of(len(paths), 'file')}{seen}")
    print_what_is_read(count, texts, hidden, left)

    lacking = {letter for letter in characters if lacks(known, letter)} if known else set()
    if lacking:
        warn_of_lost(args, {letter: characters[letter] for letter in lacking}, characters.total())

    with tempfile.TemporaryDirectory() as folder:  # of a vocabulary that is made here
        if args.bpe:
            make_bpe(args.bpe, texts, args.field, folder)
        names = folder if args.bpe else args.vocabulary, "".join(sorted(characters))
        write(texts, lacking, names, open_vocabulary(*names), args)


def prepare_chats(args):
    """Conversations -> rows, their weights, and the vocabulary."""
    paths, _ = find_texts(args.inputs)
    check_not_written_over(paths, output_paths(args.output))
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = vocabulary_of_chats(args, paths, folder)
        template = Template(vocabulary, args.vocabulary, "--vocabulary")
        with progress_bar(total_size(paths), "tokenizing", "B") as advance:
            kept, counts = chats.tokens_of(paths, template, args.sequence_length, advance)
        print_counts(counts, args)
        save_chats(kept, vocabulary, args)


def vocabulary_of_chats(args, paths, folder):
    """The Vocabulary, with a template. One that is made is of what is said, and of the template."""
    if args.bpe or args.vocabulary == "chars":
        said = [message["content"] for path, found in paths.items()
                for _, messages in chats.conversations(path, found, lambda size: None)
                for message in messages]
        if args.bpe:
            text = os.path.join(folder, "said.txt")
            with open(text, "w", encoding="utf-8") as f:
                f.write("\n".join(said))
            make_bpe(args.bpe, {text: False}, "", folder)
        vocabulary = open_vocabulary(folder if args.bpe else "chars", "\n" + "".join(said))
    else:
        vocabulary = open_vocabulary(args.vocabulary)
    if args.bpe or not isinstance(vocabulary, Folder):
        vocabulary.chat_template = OURS
    return vocabulary


def print_counts(counts, args):
    """Print how many conversations there are, and which are left out; raises UserError if no one
    is left."""
    line = f"{number_of(counts.kept, 'conversation')}, {number_of(counts.targets, 'target')}"
    if counts.shortened:
        line += (f"; {counts.shortened} end at the last answer within"
                 f" {args.sequence_length} tokens")
    print(line)
    if counts.endless:
        print(f"warning: {number_of(counts.endless, 'conversation')}: answers end with no token"
              " that ends a text: a model that learns them will not stop", file=sys.stderr)
    for why, (count, where) in counts.left.items():
        print(f"warning: {number_of(count, 'conversation')} left out, such as {where}: {why}",
              file=sys.stderr)
    if not counts.kept:
        raise UserError(f"{', '.join(args.inputs)}: no conversation with an answer among"
                        f" {counts.read}")


def save_chats(kept, vocabulary, args):
    """Write rows to train on and, unless --val_fraction is 0, rows to validate on, of other
    conversations. Each file ends with a token more, the last row's last target."""
    T = args.sequence_length
    val = 0
    if getattr(args, "val_fraction", None) != 0.0:
        if len(kept) < 2:
            raise UserError("1 conversation, expected at least one to train on and one to validate"
                            " on: pass --val_fraction 0, and train with -v 0")
        val = val_tokens(sum(len(ids) for ids, _ in kept), VAL_TOKENS, args)
    train, val = chats.split(kept, val)

    files = {}
    of_weights = {}
    for path, part in zip(output_paths(args.output), (val, train)):
        if part:
            # a few rows, again and again, would teach answers at those places alone
            times = -(-ROWS // len(chats.pack([len(ids) for ids, _ in part], T)))
            ids, weights = chats.rows_of(part, T, vocabulary.eot, times if part is train else 1)
            files[path] = [*ids, np.array([vocabulary.eot], np.int32)]
            of_weights[path] = np.append(weights, np.uint8(0))
    print(f"{len(ids)} rows of {T} tokens: train with -t {T}; {np.mean(weights > 0):.0%} are"
          f" targets" + (f"; each row is there {times} times, shuffled" if times > 1 else ""))
    save_files(files, vocabulary, args, weights=of_weights, row=T)


def print_what_is_read(count, texts, hidden, left):
    """Print how many documents there are, and what is left out: hidden names, and the files in
    `left`, {path: why it is no text; None: binary}."""
    binary = [path for path, error in left.items() if not error]
    line = f"{number_of(count, 'document')} in {number_of(len(texts), 'file')}"
    if hidden or binary:
        line += f"; skipped {number_of(hidden, 'hidden name')}, {number_of(len(binary), 'binary file')}"
    if binary:
        line += f", such as {binary[0]}"
    print(line)

    others = [*filter(None, left.values())]
    for kind in dict.fromkeys(error.kind for error in others):
        same = [error for error in others if error.kind == kind]
        print(f"warning: {number_of(len(same), f'{kind} file')} left out, such as {same[0]}",
              file=sys.stderr)


def warn_of_lost(args, lost, total):
    """Say which characters the vocabulary lacks. lost: {character: how often it is in the text}."""
    most = min(lost, key=lambda letter: (-lost[letter], letter))
    print(f"warning: --vocabulary {args.vocabulary}: lacks {number_of(len(lost), 'character')} of"
          f" the text, such as {most!r}: of {total} characters, {sum(lost.values())} are lost",
          file=sys.stderr)


def write(texts, lacking, names, vocabulary, args):
    """Tokenize the texts, and write what main() promises."""
    make_directory(os.path.dirname(args.output))
    size = total_size(texts)
    output = f"{args.output}_train.bin"
    # starting one takes as long as tokenizing a few pieces
    processes = min(args.processes, 1 + size // (4 * reading.PIECE))
    with errors_of_writing(output):
        all_tokens = tempfile.TemporaryFile(dir=os.path.dirname(args.output) or ".")
    with all_tokens:
        lost = collections.Counter()
        total = 0
        with progress_bar(size, "tokenizing", "B") as advance:
            work = reading.jobs(texts, args.field, advance, isinstance(vocabulary, Folder))
            arguments = "".join(sorted(lacking)), *names
            for tokens, characters, lost_here in in_processes(tokenize, work, processes, prepare,
                                                              arguments):
                lost += lost_here
                total += characters
                with errors_of_writing(output):
                    all_tokens.write(tokens)
                    all_tokens.flush()
        if lost:
            warn_of_lost(args, lost, total)
        if not all_tokens.tell():
            raise UserError("the text is empty now: did another program write to it just now?")
        tokens = np.memmap(all_tokens, token_type(vocabulary), "r+")
        train = len(tokens) - draw_to_the_end(tokens, vocabulary.eot,
                                              val_tokens(len(tokens), VAL_TOKENS, args))
        val = tokens[train:]
        train = tokens[:train]
        if args.shard_tokens:
            save_shards(val, train, vocabulary, args)
        else:
            save(dict(zip(output_paths(args.output), (val, train))), vocabulary, args)


def save(parts, vocabulary, args):
    """Write {path: tokens, as token_type says}, and the vocabulary."""
    files = {path: list(chunks(part["id"])) for path, part in parts.items()}
    text_bytes = {path: int(part["bytes"][1:].sum(dtype=np.int64)) for path, part in parts.items()}
    save_files(files, vocabulary, args, text_bytes)


def draw_to_the_end(tokens, eot, most):
    """Move whole documents, from all over the text, of `most` tokens together, to its end; returns
    how many tokens they have. Of a text whose documents are longer than most / 4, the end stays
    what it is, `most` tokens."""
    pieces = itertools.accumulate(map(len, chunks(tokens)), initial=0)
    starts = np.concatenate([begin + np.flatnonzero(piece["id"] == eot)
                             for begin, piece in zip(pieces, chunks(tokens))])
    lengths = np.diff(starts, append=len(tokens))
    short = np.flatnonzero(lengths <= most // 4)
    order = evenly(short)
    drawn = np.sort(order[np.cumsum(lengths[order]) <= most])
    if lengths[drawn].sum() < max(1, most // 2):
        return most
    val = np.concatenate([tokens[starts[i] : starts[i] + lengths[i]] for i in drawn])
    end = starts[drawn[0]]
    # what is between them
    for begin, stop in zip(starts[drawn] + lengths[drawn], [*starts[drawn[1:]], len(tokens)]):
        for piece in chunks(tokens[begin:stop]):
            tokens[end : end + len(piece)] = piece
            end += len(piece)
    tokens[end:] = val
    return len(val)


def save_shards(val, train, vocabulary, args):
    """Write PREFIX_val_000000.bin and the training shards, PREFIX_train_000000.bin and on, equal in
    size, at most
    --shard_tokens each."""
    shards = np.array_split(train, -(-len(train) // args.shard_tokens))
    files = {f"{args.output}_train_{number:06d}.bin": shard for number, shard in enumerate(shards)}
    for path in training_shards(args.output):
        if path not in files:
            raise UserError(f"{path}: would be read as one of the {len(shards)} shards to be"
                            " written: remove it, or pass another --output")
    save({f"{args.output}_val_000000.bin": val, **files}, vocabulary, args)


if __name__ == "__main__":
    run_main(main)
