"use strict";
// The page's numbers. Stored are the weights, and the optimizer's moments; every other tensor is
// computed, when it is first read, by formulas.js: for each layer's function, how one number
// of its result is made. To explain a number, its formula runs again, and what it reads and makes
// is noted. The data is look.py's: tensors, the calls that read and wrote them, their source.

const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent);
const list = (count, f) => Array.from({ length: count }, (_, i) => f(i));
let T, inputs, targets, positionsOf, shareOf;  // of the prompt: see usePrompt

// ---- numbers ------------------------------------------------------------------------------------

let numbers;  // what look.py's Numbers holds, all float32
async function unpack() {
  const packed = await fetch(`data:;base64,${$("numbers").textContent}`);
  const stream = packed.body.pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 4, bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < 4; plane++)
    for (let i = 0; i < count; i++) bytes[4 * i + plane] = planes[plane * count + i];
  numbers = new Float32Array(bytes.buffer);
}

const MODE = { gradient: "backward", move: "update", state: "update" };
const weights = new Set(data.tensors.filter(t => t.kind === "params").map(t => t.name));

class Tensor {
  constructor({ name, layer, kind, by, arg, shape, axes, at, of, before, whole = null }, number) {
    Object.assign(this, { name, layer, kind, by, arg, shape, axes, at, of, before, whole, number });
    Object.assign(this, { numbers: null, found: null, own: null, size: 0, strides: [0, 0] });
    this.fit();
  }
  fit() {  // to the prompt: positions grow
    const grows = i => !this.isWeight && ["position", "looks at"].includes(this.axes[i]);
    this.shape = this.shape.map((n, axis) => grows(axis) ? T : n);
    const [I, J = 1, K = 1] = this.shape;
    Object.assign(this, { size: I * J * K, strides: [J * K, K] });
  }
  get mode() { return MODE[this.kind] ?? "forward"; }
  get isWeight() { return weights.has(this.name) || this.kind === "state"; }  // or is of one
  get call() { return this.own ?? calls[this.by]; }
  get formula() { return FORMULAS[`${this.call.f.replace(/^(layer|rms)/, "")}.${this.arg}`]; }
  get key() { return `${this.name}${this.before ? ` before ${this.before}` : ""}|${this.layer}`; }
  get title() {
    const label = this.by !== null && this.formula?.label?.(this.call);
    const prefix = { gradient: this.of === undefined ? "" : "d", move: "Δ" }[this.kind] ?? "";
    return prefix + (label || this.key.split("|")[0]);
  }
  get data() {
    if (this.numbers) return this.numbers;
    const isStored = this.at !== null;
    return this.numbers = isStored ? numbers.slice(this.at, this.at + this.size)
      : quietly(() => this.computed());
  }
  computed() {
    const numbers = new Float32Array(this.size), c = this.call, f = this.formula?.of;
    const [I, J = 1, K = 1] = this.shape;
    if (!f) return numbers.fill(NaN);
    for (let i = 0, at = 0; i < I; i++)
      for (let j = 0; j < J; j++) for (let k = 0; k < K; k++) numbers[at++] = f(c, i, j, k);
    return numbers;
  }
  flat(i, j = 0, k = 0) { return this.strides[0] * i + this.strides[1] * j + k; }
  indexOf(at) {
    const [first, second] = this.strides;
    return [Math.floor(at / first), Math.floor(at % first / second), at % second]
      .slice(0, this.shape.length);
  }
  num(i, j, k) {
    const at = this.flat(i, j, k), value = this.data[at];
    if (parts) parts.push({ tensor: this, index: this.indexOf(at), value });
    return value;
  }
  get limits() { return this.found ??= this.findLimits(); }
  findLimits() {  // full: the size that has the full color; one number of 200 is larger
    const every = Math.ceil(this.size / 4096), count = Math.floor(this.size / every);
    const sampled = list(count, i => this.data[i * every]).filter(isFinite);
    const sizes = Float32Array.from(sampled, Math.abs).sort();
    let low = Infinity, high = -Infinity;
    for (const x of this.data) if (isFinite(x)) {
      low = Math.min(low, x);
      high = Math.max(high, x);
    }
    const full = sizes[Math.floor(sizes.length * .995)] || Math.max(-low, high) || 1;
    return { low, high, full };
  }
  inWhole(index) { return index.map((i, axis) => this.whole?.[axis][i] ?? i); }
  label(index) { return `${this.title}[${this.inWhole(index).join(", ")}]`; }
  inWords(index) {
    const named = { token: i => `“${word(i)}”`, position, "looks at": position };
    return this.inWhole(index).map((i, axis) => {
      const what = this.axes[axis], isPlain = this.isWeight && what === "position";
      return `${what} ${isPlain ? i : named[what]?.(i) ?? i}`;
    });
  }
  href(index) { return `#${this.mode}/${this.key}/${index.join(",")}/${this.number}`; }
}

T = data.ids.length - 1;
const tensors = data.tensors.map((fields, number) => new Tensor(fields, number));
const named = all => Object.fromEntries(Object.entries(all).map(([name, n]) => [name, tensors[n]]));
const callOf = ({ f, ins, outs, sizes }) => {  // c.inp: its argument inp; c.outs.qkv: qkv after it
  const { C, NH } = sizes;
  return { HS: C / NH, NKV: NH, ...sizes, ...outs, ...ins, f, ins, outs, shared: {} };
};
const calls = data.calls.map(c => callOf({ ...c, ins: named(c.ins), outs: named(c.outs) }));
const forward = calls.slice(0, data.forward);
const keyed = kinds =>
  Object.fromEntries(tensors.filter(t => kinds.includes(t.kind)).map(t => [t.key, t]));
const newest = keyed(["params", "acts"]), moves = keyed(["move"]);
const gradients = Object.fromEntries(
  Object.entries(data.gradients).map(([n, gradient]) => [tensors[n].key, tensors[gradient]]));
const shownIn = { forward: newest, backward: gradients, update: { ...moves, ...keyed(["state"]) } };

const word = id => data.vocabulary[id] === " " ? "␣"
  : JSON.stringify(data.vocabulary[id]).slice(1, -1);
const position = t => t < T ? `${t} “${word(inputs[t])}”` : t;  // wpe has more
function say(x) {  // three digits
  const size = Math.abs(x), isPlain = size >= 1e-3 && size < 1e5 || !isFinite(x);
  const text = Number.isInteger(x) && size < 1e5 ? `${x}`
    : isPlain ? x.toPrecision(3) : x.toExponential(2);
  return text.replaceAll("-", "−");
}

function forget(kinds = null) {  // what is computed, of all or some kinds
  for (const t of tensors)
    if (t.by !== null && (!kinds || kinds.includes(t.kind))) t.numbers = t.found = null;
  for (const c of calls) c.shared = {};
}
const given = (arg, make) => tensors.filter(t => t.arg === arg && t.by === null)
  .forEach(t => Object.assign(t, { numbers: Float32Array.from(list(T, make)), found: null }));
const lossWeights = (weight = shareOf) => given("dlosses", weight);
function usePrompt(ids, weights = null) {  // weights: of the targets' losses; null: all alike
  [T, inputs, targets] = [ids.length - 1, ids.slice(0, -1), ids.slice(1)];
  const sum = weights ? weights.reduce((sum, w) => sum + w, 0) : T;
  shareOf = t => (weights ? weights[t] : 1) / sum;
  positionsOf = Map.groupBy(list(T, t => t), t => inputs[t]);  // of a token
  for (const t of tensors) {
    t.fit();
    if (t.kind === "" && t.by === null) t.numbers = t.found = null;
  }
  given("inp", t => inputs[t]);
  given("targets", t => targets[t]);
  lossWeights();
  forget();
}

// ---- what formulas are made of ------------------------------------------------------------------

// Of the number being explained: what was read, { tensor, index, value }, or made, { name,
// expression, value, rows }; an expression names arguments of the call, sizes, and what was made.
let parts = null;

function is(name, expression, value, rows) {
  if (parts) parts.push({ name, expression, value, rows });
  return value;
}
const because = (words, value) => is("", `“${words}”`, value);  // words, no expression
function noting(own, make) {  // -> what is made; its parts are noted in `own`
  const outer = parts;
  parts = own;
  const value = make();
  parts = outer;
  return value;
}
const quietly = make => noting(null, make);
function sum(name, expression, count, term) {  // explained by rows: parts of a term, and its value
  const rows = parts && list(count, () => ({ parts: [] }));
  let sum = 0;
  for (let i = 0; i < count; i++)
    sum += rows ? rows[i].value = noting(rows[i].parts, () => term(i)) : term(i);
  return is(name, expression, sum, rows);
}
// The sum of a's numbers, from `at` on in steps, times b's: most of a model's work.
function dot(name, expression, count, a, at, step, b, to, stride) {
  const x = a.data, y = b.data, whole = count & ~3;
  let s = 0, s1 = 0, s2 = 0, s3 = 0, i = at, j = to, k = 0;
  for (; k < whole; k += 4) {
    s += x[i] * y[j];
    s1 += x[i += step] * y[j += stride];
    s2 += x[i += step] * y[j += stride];
    s3 += x[i += step] * y[j += stride];
    i += step;
    j += stride;
  }
  for (; k < count; k++, i += step, j += stride) s += x[i] * y[j];
  s += s1 + s2 + s3;
  if (!parts) return s;
  const read = (tensor, i) => ({ tensor, index: tensor.indexOf(i), value: tensor.data[i] });
  return is(name, expression, s, list(count, k => {
    const both = [read(a, at + k * step), read(b, to + k * stride)];
    return { parts: both, value: both[0].value * both[1].value };
  }));
}
// What all numbers of a row need: made once.
const shared = (c, row, name, expression, make) =>
  is(name, expression, (c.shared[name] ??= [])[row] ??= quietly(make));
