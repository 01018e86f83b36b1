"""
Text from a model: GPT-2 continues a prompt.

    python generate.py runs/mine                      # the newest model there; or a .bin file, or a Hugging Face folder
    python generate.py gpt2_124M.bin --prompt "First Citizen:" --tokens 200 --samples 3 --top_k 50
    echo "Once upon a time" | python generate.py gpt2_124M.bin --prompt -
    python generate.py runs/mine --interactive        # a prompt a line
    python generate.py SmolLM2-135M-Instruct/ --chat --interactive    # a conversation, with a chat model

It runs on the GPU if there is one (in bfloat16 if the GPU has it), else in NumPy. One sample is
printed token by token, several are printed one after the other. Without a prompt, the text begins
after the end-of-text token; without flags, sampling is the trainer's. Keys and values of earlier
positions are cached; beyond the model's longest sequence, the window slides by half its length.
On a GPU, a sample among several does not depend on how many they are; where it is the only one,
and on a CPU, sums may be rounded differently.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import argparse
import itertools
import json
import os
import sys
import warnings

import numpy as np

from llmc.chat import Template
from llmc.errors import Parser, UserError, describe, run_main
from llmc.gpu.device import gpu_errors_as_lines, try_gpu
from llmc.hf_tokenizer import read_object
from llmc.sampler import Choice, Random, Writer, end_of_text
from llmc.api import check_numbers, load_with_vocabulary, on_gpu
from llmc.vocabulary import valid

# --------------------------------------------------------------------------------------------------
# model and prompt


def make_decoder(architecture, config, params, args):
    """Return a decoder on the GPU, if one can run this model, else in NumPy."""
    def open_on(gpu):
        from llmc.gpu.decoder import open_decoder

        return open_decoder(on_gpu(architecture), gpu, config, params, args.samples, config.maxT,
                            args.dtype)

    found = try_gpu(args.device, open_on)
    if found:
        return found
    if args.dtype == "bfloat16":
        raise UserError("--dtype bfloat16: this runs on the CPU, in float32: pass --dtype float32")
    return architecture.Decoder(config, params, args.samples, config.maxT)


def prompt_ids(prompt, tokenizer, V):
    """Return the ids (1, T) int32 of a prompt, a text or a list of ids; raises UserError for ids
    the model lacks."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("--prompt: no tokenizer file to encode it with: pass --tokenizer FILE,"
                            " or --prompt_ids")
        try:
            prompt = tokenizer.encode(prompt)
        except UserError as error:
            raise UserError(f"--prompt: {error}") from None
        if not prompt:
            raise UserError("--prompt: is empty, expected a text; leave the flag out to begin a"
                            " new one")
    wrong = next((id for id in prompt if not 0 <= id < V), None)
    if wrong is not None:
        raise UserError(f"--prompt_ids: {wrong}, expected ids from 0 to {V - 1}")
    return np.array([prompt], np.int32)


class Chat:
    """A conversation with a chat model, in the format of its chat template."""

    def __init__(self, model, tokenizer):
        """Raises UserError unless there is a valid template."""
        self.vocabulary = tokenizer
        self.template = Template(tokenizer, model, "--chat")
        self.messages = []
        self.asked = []

    def ask(self, text):
        """The ids of the conversation with the user's next message, up to where the answer
        begins."""
        self.asked = [*self.messages, {"role": "user", "content": valid(text)}]
        whole = self.template.render(self.asked, answers=True)
        ids = self.template.encode(whole)[0]
        if not ids:
            raise UserError(f"--chat: the chat template makes {whole!r} of the message, which is"
                            " no token")
        return ids

    def listen(self, steps):
        """Yield the same steps, and remember the first sample's answer, even if it is
        interrupted."""
        answer = []
        try:
            for ids, logprobs in steps:
                answer.append(int(ids[0]))
                yield ids, logprobs
        finally:
            kept = [id for id in until(self.vocabulary.stops, answer)
                    if id not in self.vocabulary.stops]
            answer = {"role": "assistant", "content": self.vocabulary.decode(kept).strip()}
            # with the question, which is kept only if the template takes it
            self.messages = [*self.asked, answer]


# --------------------------------------------------------------------------------------------------
# text


def streams(seed, samples):
    """Return a Random for each sample; with seed 1337, the first one is the trainer's."""
    # 2^64 divided by the golden ratio: consecutive multiples are far from each other
    odd = 0x9E3779B97F4A7C15
    return [Random((seed + i * odd) % 2**64 or odd) for i in range(samples)]


def until_all_stop(steps, stops):
    """Yield steps until every sequence has produced one of the tokens `stops`."""
    ended = False
    stops = list(stops)
    for ids, logprobs in steps:
        yield ids, logprobs
        ended |= np.isin(ids, stops)
        if np.all(ended):
            return


def until(stops, ids):
    """Yield ids up to and including the first one of `stops`."""
    for id in ids:
        yield id
        if id in stops:
            return


def write(ids, tokenizer, stops):
    """Print ids as text, one at a time, without the tokens `stops`."""
    writer = Writer(tokenizer)
    try:
        for id in ids:
            if id not in stops:
                writer.write(id)
    finally:  # after Ctrl-C, too
        writer.end()


def run_prompt(decoder, prompt, tokenizer, args, randoms, V, chat=None):
    """Print samples that continue one prompt: a text, a list of ids, or None to begin a text. chat:
    a Chat, for prompts that are messages."""
    eot = end_of_text(tokenizer, V)
    prompt = chat.ask(prompt) if chat else prompt
    ids = np.array([[eot]], np.int32) if prompt is None else prompt_ids(prompt, tokenizer, V)
    # the last token is not fed back
    if ids.shape[1] + args.tokens > decoder.T + 1 and not args.noted:
        args.noted = True
        print(f"note: the model sees {decoder.T} tokens at a time: beyond them, the window slides"
              f" by {decoder.T // 2}", file=sys.stderr)
    stops = () if args.ignore_eot else tokenizer.stops if tokenizer else {eot}
    choice = Choice(args.temperature, args.top_k, args.top_p)
    steps = until_all_stop(decoder.draw(ids, args.tokens, randoms, choice, want_logprobs=args.json),
                           stops)
    steps = chat.listen(steps) if chat else steps
    shown = [] if prompt is None else ids[0].tolist()
    typed = args.interactive and sys.stdin.isatty()  # so the terminal shows the prompt already
    printed = [] if typed or chat else shown
    if args.samples == 1 and not args.json:
        write(itertools.chain(printed, until(stops, (int(new[0]) for new, _ in steps))), tokenizer,
              stops)
        return
    drawn = []
    try:
        for step in steps:
            drawn.append(step)
    finally:  # after Ctrl-C, print the tokens drawn so far
        if args.json and drawn:
            print_json(drawn, shown, tokenizer, stops)
        elif drawn:
            for i, column in enumerate(np.array([new for new, _ in drawn]).T.tolist()):
                if i > 0:
                    print("---", flush=True)
                write(itertools.chain(printed, until(stops, column)), tokenizer, stops)


def print_json(steps, shown, tokenizer, stops):
    """Print a JSON line per sample: the prompt's ids, the sampled ids, their text and the model's
    log-probabilities."""
    for b in range(len(steps[0][0])):
        ids = list(until(stops, (int(new[b]) for new, _ in steps)))
        logprobs = [float(of_step[b]) for _, of_step in steps[: len(ids)]]
        text = None
        if tokenizer:
            text = tokenizer.decode([id for id in ids if id not in stops], after=shown)
        print(json.dumps({"prompt_ids": shown, "ids": ids, "text": text, "logprobs": logprobs}))


# --------------------------------------------------------------------------------------------------
# main


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("model",
                        help="the directory of a run, a .bin file or a Hugging Face folder")
    parser.add_argument("--checkpoint", metavar="best|last|N", default="",
                        help="of a run; N: of step N (default: the best where --patience kept it,"
                        " else the last)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", default=argparse.SUPPRESS,
                       help="text to continue; -: read it from standard input (default: begin a"
                       " new text)")
    group.add_argument("--prompt_ids", type=int, nargs="+", metavar="ID",
                       help="the prompt, as token ids", default=argparse.SUPPRESS)
    group.add_argument("--interactive", action="store_true",
                       help="each line of standard input is a prompt; Ctrl-C ends an answer,"
                       " Ctrl-D the program")
    parser.add_argument("--chat", action="store_true",
                        help="prompts are what a user says to a chat model, from a Hugging Face"
                        " folder with a chat template; with --interactive, a conversation")
    parser.add_argument("--tokens", type=int, metavar="N", default=100,
                        help="generate at most N tokens per sample")
    parser.add_argument("--samples", type=int, metavar="N", default=1, help="number of samples")
    parser.add_argument("--temperature", type=float, metavar="X", default=argparse.SUPPRESS,
                        help="divides the logits; 0: the likeliest token (default: 1; with --chat,"
                        " that of generation_config.json in the folder; if that has none of these"
                        " three, 0.2 and --top_p 0.9)")
    parser.add_argument("--top_k", type=int, metavar="N", default=argparse.SUPPRESS,
                        help="draw among the N likeliest tokens (default: 0, all)")
    parser.add_argument("--top_p", type=float, metavar="X", default=argparse.SUPPRESS,
                        help="draw among the fewest likeliest tokens whose probabilities add up to"
                        " X (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", default=1337, help="random seed")
    parser.add_argument("--ignore_eot", action="store_true", help="do not stop at end of text")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto",
                        help="auto: the GPU if there is one")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto",
                        help="dtype on a GPU (auto: bfloat16 if it has that)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each sample")
    parser.add_argument("--tokenizer", metavar="FILE", default=argparse.SUPPRESS,
                        help="tokenizer file (default: the one beside the model)")
    parser.set_defaults(noted=False)  # whether the note on the sliding window was printed
    args = parser.parse_args()
    if args.chat and not (args.interactive or hasattr(args, "prompt")):
        raise UserError("--chat: expected --prompt TEXT, or --interactive")
    check_numbers("--", **vars(args))
    return args


# fields of generation_config.json that change what is drawn, and which this program leaves out:
# what each
UNUSED = {
    # is
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    # without effect
    "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1,
    "penalty_alpha": None, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": None,
    "force_words_ids": None, "constraints": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "stop_strings": None,
}  # fmt: skip


def complete(args, tokenizer):
    """Set what the command line leaves open of how tokens are drawn: with --chat as the folder's
    generation_config.json says or, if that says nothing of it, with little chance."""
    defaults = Choice()._asdict()
    if args.chat:
        path = f"{tokenizer.prefix}generation_config.json"
        config = {name: value for name, value in read_object(path).items() if value is not None}
        found = {name: config[name] for name in defaults if name in config}
        check_numbers(f"{path}: ", **found)

        if not config.get("do_sample", True):
            defaults["temperature"] = 0.0
        elif found or "do_sample" in config:
            defaults |= {"top_k": 50} | found  # 50: transformers' default
        else:
            defaults |= {"temperature": 0.2, "top_p": 0.9}

        left_out = [f"{name} {config[name]}" for name, neutral in UNUSED.items()
                    if config.get(name, neutral) not in (neutral, 0, [], {})]
        if left_out:
            print(f"note: {path}: {', '.join(left_out)}: not used", file=sys.stderr)
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name, value))


@gpu_errors_as_lines()
def main():
    # of overflow: logits that are not finite are an error anyway
    warnings.simplefilter("ignore", RuntimeWarning)
    args = parse_arguments()
    if hasattr(sys.stdin, "reconfigure"):  # a test's has none
        # not UTF-8, as in sys.argv; CRLF
        sys.stdin.reconfigure(errors="surrogateescape", newline=None)
    needs_vocabulary = not hasattr(args, "prompt_ids")
    architecture, config, params, tokenizer = load_with_vocabulary(
        args.model, getattr(args, "tokenizer", None), args.checkpoint, needs_vocabulary)
    try:
        decoder = make_decoder(architecture, config, params, args)
    except MemoryError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--samples {args.samples}: out of memory ({reason}); pass fewer") from None
    randoms = streams(args.seed, args.samples)
    chat = Chat(args.model, tokenizer) if args.chat else None
    complete(args, tokenizer)
    if args.interactive:
        status = 0
        print("> ", end="", file=sys.stderr, flush=True)
        for line in sys.stdin:
            if line.strip():
                try:
                    run_prompt(decoder, line.rstrip("\n"), tokenizer, args, randoms, config.V, chat)
                except KeyboardInterrupt:  # ends this answer
                    print(file=sys.stderr)
                except UserError as error:  # the next line may be better
                    status = 1
                    print(f"{os.path.basename(sys.argv[0])}: {describe(error)[0]}", file=sys.stderr)
            print("> ", end="", file=sys.stderr, flush=True)
        return status
    prompt = getattr(args, "prompt", getattr(args, "prompt_ids", None))
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    run_prompt(decoder, prompt, tokenizer, args, randoms, config.V, chat)


if __name__ == "__main__":
    run_main(main)
