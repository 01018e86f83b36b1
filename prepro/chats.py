"""Conversations -> rows of tokens, and which of them are targets: what the assistant says, and the
token that ends it."""

import bisect
import itertools

import numpy as np

from llmc.chat import NotPrefixes
from llmc.errors import UserError
from prepro.common import evenly
from prepro.reading import is_parquet, parse_json, read_array, read_lines, read_text, records_of

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
# role -> those that may come before it; None: nothing
BEFORE = {"system": (None,), "user": (None, "system", "assistant"), "assistant": ("user", "tool"),
          "tool": ("assistant", "tool")}


def conversations(path, found, advance):
    """Yield (where it stands, [{"role", "content"}]) of each conversation of a file: JSON lines, or
    a JSON array. Raises UserError, with that place, for one that is none."""
    what = None if is_parquet(path) else "line" if begins_with_messages(path) else records_of(
        path, "messages", found)
    if what is None:
        raise UserError(f"{path}: expected a conversation a line, as JSON with 'messages'")
    if what == "element":
        records = read_array(path, advance)
        places = (f"{path}: element {number}" for number in itertools.count(1))
    else:
        records = read_lines(read_text(path, advance))
        places = (f"{path}:{number}" for number in itertools.count(1))
    for where, record in zip(places, records):
        if isinstance(record, str):
            if not record.strip():
                continue
            text, record = record, parse_json(record)
            if record is None:
                raise UserError(f"{where}: not JSON, found {text[:40]!r}: mend or remove the line")
        yield where, messages_of(where, record)


def begins_with_messages(path):
    """Whether a file's first line is a bare list of messages."""
    first = parse_json(next((line for line in read_lines(read_text(path)) if line.strip()), ""))
    return (isinstance(first, list) and bool(first) and isinstance(first[0], dict)
            and not {"role", "from"}.isdisjoint(first[0]))


def messages_of(where, record):
    """The messages of a record: {"messages": [...]} or the bare list, of role and content, or
    {"conversations": [...]}, of from and value. Raises UserError for another, and for roles out of
    order."""
    messages = record
    if isinstance(record, dict):
        messages = record.get("messages", record.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: expected 'messages', a list with role and content, found"
                        f" {str(record)[:40]!r}")

    found = []
    for number, message in enumerate(messages, 1):
        place = f"{where}: message {number}"
        fields = message if isinstance(message, dict) else {}
        if fields.get("tool_calls"):
            raise UserError(f"{place}: has tool_calls, which are not read: leave it out")
        role = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        if isinstance(content, list):  # of parts, of which a text model reads those of text
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        role = ROLES.get(role, role) if isinstance(role, str) else role
        if not isinstance(role, str) or role not in BEFORE:
            raise UserError(f"{place}: role {str(role)!r}, expected {', '.join(BEFORE)}")
        if not isinstance(content, str) or not content.strip():
            raise UserError(f"{place}: expected a text as its content, found"
                            f" {str(content)[:40]!r}")
        before = found[-1]["role"] if found else None
        if before not in BEFORE[role]:
            raise UserError(f"{place}: {role} after {before or 'nothing'}, expected one of"
                            f" {', '.join(str(b or 'the beginning') for b in BEFORE[role])} before")
        # replace lone surrogates
        content = content.encode(errors="replace").decode()
        found.append({"role": role, "content": content})
    return found


class Counts:
    """What became of conversations."""

    def __init__(self):
        self.read = self.kept = self.shortened = self.targets = 0
        self.endless = 0  # conversations whose answers end with no token that ends a text
        self.left = {}  # why -> (how many, where the first one stands)

    def leave(self, why, where):
        count, first = self.left.get(why, (0, where))
        self.left[why] = count + 1, first


def tokens_of(texts, template, T, advance):
    """([(ids, weights)] of the conversations of files, {path: whether found in a folder}, each of
    at most T tokens; Counts)."""
    counts = Counts()
    kept = []
    for path, found in texts.items():
        for where, messages in conversations(path, found, advance):
            counts.read += 1
            try:
                ids, weights, ends = template.tokens(messages)
            except NotPrefixes:
                counts.leave("its template renders messages differently when later ones follow, so"
                             " that answers cannot be told", where)
                continue
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            if not ends:
                counts.leave("it has no answer", where)
                continue
            if len(ids) > T:
                whole = [end for end in ends if end <= T]
                if not whole:
                    counts.leave(f"its first answer ends beyond {T} tokens", where)
                    continue
                counts.shortened += 1
                ids, weights = ids[: whole[-1]], weights[: whole[-1]]
            counts.kept += 1
            counts.endless += ids[ends[0] - 1] not in template.vocabulary.stops
            counts.targets += sum(weights)
            kept.append((ids, weights))
    return kept, counts


def pack(lengths, T):
    """Rows of T tokens: lists of indices into `lengths`, the longest first, each into the row with
    the least room that has enough."""
    rows = []
    by_room = {}  # room that is left -> rows
    rooms = []  # its keys, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(rooms, lengths[index])
        if at == len(rooms):
            room, row = T, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[row].append(index)
        left = room - lengths[index]
        if left not in by_room:
            bisect.insort(rooms, left)
        by_room.setdefault(left, []).append(row)
    return rows


def split(kept, count):
    """(conversations to train on, those to validate on): the latter from all over, of about `count`
    tokens, at least one unless that is 0."""
    order = evenly(np.arange(len(kept)))
    ends = np.cumsum([len(kept[i][0]) for i in order])
    drawn = set(order[: max(1, int(np.searchsorted(ends, count, "right")))].tolist() if count
                else [])
    return ([one for i, one in enumerate(kept) if i not in drawn],
            [one for i, one in enumerate(kept) if i in drawn])


def rows_of(kept, T, pad, times=1):
    """(ids, weights), each (rows, T): rows of conversations [(ids, weights)], each `times` times,
    its conversations in any order; what is left of a row is `pad`, without weight."""
    rows = pack([len(ids) for ids, _ in kept], T)
    all_ids = np.full((times * len(rows), T), pad, np.int32)
    all_weights = np.zeros((times * len(rows), T), np.uint8)
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(times)])
    for ids_row, weights_row, number in zip(all_ids, all_weights, order):
        end = 0
        for i in rng.permutation(rows[number]):
            ids, weights = kept[i]
            ids_row[end : end + len(ids)] = ids
            weights_row[end : end + len(ids)] = weights
            end += len(ids)
    return all_ids, all_weights
