"use strict";
// The page's numbers. Stored are the weights; every other tensor is computed, when it is first read, by the formulas
// below: for each layer's function, how one number of its result is made. To explain a number, its formula runs again,
// and what it reads and makes is noted. The data is look.py's: tensors, the calls that read and wrote them, the
// functions' source.

const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent);
const T = data.ids.length - 1, inputs = data.ids.slice(0, T), targets = data.ids.slice(1);
const list = (count, f) => Array.from({ length: count }, (_, i) => f(i));

// ---- numbers --------------------------------------------------------------------------------------------------------

let numbers;  // what look.py's Numbers holds, all float32
async function unpack() {
  const characters = new TextDecoder("windows-1252").decode(Uint8Array.from(list(256, byte => byte)));
  const text = $("numbers").textContent.replace(/=(.)/gs, (_, c) => String.fromCharCode(c.charCodeAt() ^ 64));
  const packed = new Uint8Array(text.length), byteOf = new Uint8Array(65536);
  for (let byte = 0; byte < 256; byte++) byteOf[characters.charCodeAt(byte)] = byte;
  for (let i = 0; i < text.length; i++) packed[i] = byteOf[text.charCodeAt(i)];
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer()), count = planes.length / 4;
  const bytes = new Uint8Array(planes.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = planes[(i & 3) * count + (i >> 2)];
  numbers = new Float32Array(bytes.buffer);
}
const stored = (at, size) => numbers.subarray(at, at + size);

const PREFIX = { forward: "", backward: "d", update: "Δ" };
const AXES = {  // what indices count; of other tensors, by their rank
  wte: ["token", "channel"], lm_head: ["token", "channel"], lm_headb: ["token"], wpe: ["position", "channel"],
  logits: ["position", "token"], probs: ["position", "token"],
};

class Tensor {
  constructor(fields, number) {
    const [I, J = 1, K = 1] = fields.shape, key = `${fields.name}|${fields.layer}`;
    const mode = { gradient: "backward", move: "update" }[fields.kind] ?? "forward", title = PREFIX[mode] + fields.name;
    Object.assign(this, { number, key, mode, title, size: I * J * K, strides: [J * K, K] }, fields);
  }
  get data() { return this.numbers ??= this.at === null ? quietly(() => this.computed()) : stored(this.at, this.size); }
  get formula() { return FORMULAS[`${calls[this.by].f.replace(/^(layer|rms)/, "")}.${this.arg}`]; }
  computed() {
    const c = calls[this.by], [, formula, all] = this.formula;
    return all ? all(c) : new Float32Array(this.size).map((_, at) => formula(c, ...this.indexOf(at)));
  }
  flat(i, j = 0, k = 0) { return this.strides[0] * i + this.strides[1] * j + k; }
  indexOf(at) {
    const [first, second] = this.strides;
    return [Math.floor(at / first), Math.floor(at % first / second), at % second].slice(0, this.shape.length);
  }
  num(i, j, k) {
    const value = this.data[this.flat(i, j, k)];
    if (parts) parts.push({ tensor: this, index: [i, j, k].slice(0, this.shape.length), value });
    return value;
  }
  get limits() { return this.found ??= this.findLimits(); }
  findLimits() {  // full: the size that has the full color; one number of 200 is larger
    const every = Math.ceil(this.size / 4096), sampled = list(Math.floor(this.size / every), i => this.data[i * every]);
    const sizes = Float32Array.from(sampled.filter(isFinite), Math.abs).sort();
    let low = Infinity, high = -Infinity;
    for (const x of this.data) if (isFinite(x)) {
      low = Math.min(low, x);
      high = Math.max(high, x);
    }
    return { low, high, full: sizes[Math.floor(sizes.length * .995)] || Math.max(-low, high) || 1 };
  }
  get isWeight() { return weights.has(this.name); }  // or a weight's gradient, or its move
  get axes() {
    return AXES[this.name] ?? (this.isWeight ? [["channel"], ["output", "input"]]
      : [["position"], ["position", "channel"], ["head", "position", "looks at"]])[this.shape.length - 1];
  }
  inWhole(index) { return index.map((i, axis) => this.whole?.[axis][i] ?? i); }  // a move has some rows and columns
  label(index) { return `${this.title}[${this.inWhole(index).join(", ")}]`; }
  inWords(index) {
    const named = { token: i => `“${word(i)}”`, head: i => i + 1, position, "looks at": position };
    return this.inWhole(index).map((i, axis) => `${this.axes[axis]} ${named[this.axes[axis]]?.(i) ?? i}`);
  }
  href(index) { return `#${this.mode}/${this.key}/${index.join(",")}/${this.number}`; }
}

const tensors = data.tensors.map((fields, number) => new Tensor(fields, number));
const weights = new Set(tensors.filter(t => t.kind === "params").map(t => t.name));
const keyed = kinds => Object.fromEntries(tensors.filter(t => kinds.includes(t.kind)).map(t => [t.key, t]));
const newest = keyed(["params", "acts"]), moves = keyed(["move"]);  // as the forward pass left them; the optimizer's
const pick = numbers => Object.fromEntries(Object.entries(numbers).map(([name, number]) => [name, tensors[number]]));
const shownIn = { forward: newest, backward: pick(data.gradients), update: moves };
const calls = data.calls.map(({ f, ins, outs, sizes }) => {  // c.inp: its argument inp; c.ins.qkv: qkv before the call
  const { C, NH } = sizes, [before, after] = [pick(ins), pick(outs)];
  return { HS: C / NH, NKV: NH, eps: 1e-5, ...sizes, ...after, ...before, f, ins: before, outs: after, shared: {} };
});

const word = id => JSON.stringify(data.vocabulary[id]).slice(1, -1);
const position = t => t < T ? `${t} “${word(inputs[t])}”` : t;  // wpe has more
function say(x) {  // three digits
  const size = Math.abs(x), isPlain = size >= 1e-3 && size < 1e5 || x === 0 || !isFinite(x);
  return (x === 0 ? "0" : isPlain ? x.toPrecision(3) : x.toExponential(2)).replaceAll("-", "−");
}

// ---- what formulas are made of --------------------------------------------------------------------------------------

let parts = null;  // of the number being explained: what was read, { tensor, index, value }, or made, { words, value }

function is(words, value, rows) {
  parts?.push({ words, value, rows });
  return value;
}
function noting(own, make) {  // -> what is made; its parts are noted in `own`
  const outer = parts;
  parts = own;
  const value = make();
  parts = outer;
  return value;
}
const quietly = make => noting(null, make);
function sum(words, count, term) {  // explained by rows: the parts of a term, and its value
  const rows = parts && list(count, () => ({ parts: [] }));
  let sum = 0;
  for (let i = 0; i < count; i++) sum += rows ? rows[i].value = noting(rows[i].parts, () => term(i)) : term(i);
  return is(words, sum, rows);
}
// What all numbers of a row need: made once.
const shared = (c, row, words, make) => is(words, (c.shared[words] ??= [])[row] ??= quietly(make));
const sharedSum = (c, row, words, count, term) => shared(c, row, words, () => sum("", count, term));

// ---- what formulas share --------------------------------------------------------------------------------------------

// Sums of products along axis p of a tensor and axis q of another: number (i, j) is of the first's i, the other's j.
const matmul = (mark, words, first, p, second, q) => [mark, (c, i, j) => {
  const a = c[first], b = c[second], term = k => (p ? a.num(i, k) : a.num(k, i)) * (q ? b.num(j, k) : b.num(k, j));
  return sum(words, a.shape[p], term) + (c.bias?.num(j) ?? 0);
}, c => {  // all of them, much faster
  const [a, b] = [c[first], c[second]], [x, y, bias] = [a.data, b.data, c.bias?.data];
  const count = a.shape[p], J = b.shape[1 - q], [step, stride] = [a.strides[p], b.strides[q]];
  return new Float32Array(a.shape[1 - p] * J).map((_, number) => {
    const j = number % J;
    let sum = 0, at = (number - j) / J * a.strides[1 - p], to = j * b.strides[1 - q];
    for (let k = 0; k < count; k++, at += step, to += stride) sum += x[at] * y[to];
    return sum + (bias?.[j] ?? 0);
  });
}];

// A function of one number or, with dout, the gradient through it.
const apply = (mark, words, f, arg = "inp", dout = null) =>
  [mark, (c, t, j) => (dout ? c.ins[dout].num(t, j) : 1) * is(words, f(c.ins[arg].num(t, j)))];
const S = Math.sqrt(2 / Math.PI), CUBE = 0.044715, bend = x => Math.tanh(S * (x + CUBE * x * x * x));
const geluSlope = x => (1 + bend(x)) / 2 + x / 2 * (1 - bend(x) ** 2) * S * (1 + 3 * CUBE * x * x);
const sigmoid = x => 1 / (1 + Math.exp(-x));

function softmax(c, row, count, number, own) {
  const x = number(own), most = shared(c, row, "the row's largest", () => Math.max(...list(count, number)));
  const all = sharedSum(c, row, "sum over the row of exp(number − largest)", count, i => Math.exp(number(i) - most));
  return is("exp(its number − largest) / that sum", Math.exp(x - most) / all);
}

function inverseSize(x, t, start, count, mean, eps) {  // of `count` numbers from x[t, start] on: a row's, or a head's
  const squares = sum(mean ? "(x − mean)²" : "x²", count, i => (x.num(t, start + i) - mean) ** 2);
  return is(`1 / √(their mean + ${say(eps)})`, 1 / Math.sqrt(squares / count + eps));
}
const normalized = (c, t, j) => is(c.mean ? "n = (x − mean) × rstd" : "n = x × rstd",
  (c.inp.num(t, j) - (c.mean?.num(t) ?? 0)) * c.rstd.num(t));
const columnSum = (c, j) => sum("all positions", T, t => c.dout.num(t, j));

// Where the query, key and value of head h begin in a row of qkv. Several query heads may share a key and value head.
const query = (c, h) => h * c.HS, key = (c, h) => (c.NH + Math.floor(h * c.NKV / c.NH)) * c.HS;
const value = (c, h) => key(c, h) + c.NKV * c.HS;
const whose = (c, j) => (j >= c.NH * c.HS) + (j >= (c.NH + c.NKV) * c.HS);  // a query's channel, a key's, a value's
const causal = (masked, number) => (c, h, t, t2) =>
  t2 > t ? is("a later position: masked", masked) : number(c, h, t, t2);

const score = causal(-Infinity, (c, h, t, t2) => is(`divided by √${c.HS}`, sum("query × key", c.HS, i =>
  c.inp.num(t, query(c, h) + i) * c.inp.num(t2, key(c, h) + i)) / Math.sqrt(c.HS)));
const gradientOfAtt = (c, h, t, t2) => sum("gradient of the head's output × value", c.HS, i =>
  c.dout.num(t, query(c, h) + i) * c.inp.num(t2, value(c, h) + i));
const gradientOfScore = causal(0, (c, h, t, t2) => {
  const datt = x => c.outs.dpreatt ? c.outs.datt.num(h, t, x) : gradientOfAtt(c, h, t, x), own = datt(t2);
  const all = sharedSum(c, h * T + t, "sum over the row of att × datt", t + 1, x => c.att.num(h, t, x) * datt(x));
  return is(`att × (datt − that sum) / √${c.HS}`, c.att.num(h, t, t2) * (own - all) / Math.sqrt(c.HS));
});
function gradientOfQkv(c, t, j) {
  const { HS, NH, NKV } = c, scores = c.outs.dpreatt ?? c.outs.datt, head = Math.floor(j / HS), i = j % HS;
  if (whose(c, j) === 0) return sum("gradients of its scores × keys", t + 1, t2 =>
    scores.num(head, t, t2) * c.inp.num(t2, key(c, head) + i));
  const every = NH / NKV, first = (head - NH) % NKV * every;  // the heads that share the key and value
  const [words, by, rows] = whose(c, j) === 1 ? ["gradients of its scores × queries", scores, c.inp]
    : ["probabilities × gradients of the head's output", c.att, c.dout];
  return sum(words, every * (T - t), n => {
    const h = first + n % every, later = t + Math.floor(n / every);
    return by.num(h, later, t) * rows.num(later, h * HS + i);
  });
}
const rotation = (mark, arg, sign) => [mark, (c, t, j) => {
  if (j >= c.heads * c.HS) return is("a value: it is not rotated", c.ins[arg].num(t, j));
  const pair = Math.floor(j % c.HS / 2), a = c.ins[arg].num(t, j - j % 2), b = c.ins[arg].num(t, j - j % 2 + 1);
  const cos = c.cos.num(t, pair), sin = sign * c.sin.num(t, pair);
  return j % 2 ? is("a sin + b cos", a * sin + b * cos) : is("a cos − b sin", a * cos - b * sin);
}];

const positionsOf = Map.groupBy(list(T, t => t), t => inputs[t]);  // of a token
const weightAndGradient = ({ move }, index) =>
  [newest, shownIn.backward].map(all => all[move.key].num(...move.inWhole(index)));

// ---- the formulas ---------------------------------------------------------------------------------------------------

// function.argument -> [what its source has on the line that computes it, (call, ...index) -> number]
const FORMULAS = {
  "encoder_forward.out": ["np.take(", (c, t, j) => c.wte.num(inputs[t], j) + (c.wpe?.num(t, j) ?? 0)],
  "encoder_backward.dwte": ["dwte[tokens", (c, id, j) => {
    const at = positionsOf.get(id) ?? [], before = c.ins.dwte?.num(id, j) ?? 0;
    return before + sum("the positions with this token", at.length, i => c.dout.num(at[i], j));
  }],
  "encoder_backward.dwpe": ["np.add.reduce(dout", (c, t, j) => t < T ? c.dout.num(t, j) : is("no token is there", 0)],
  "matmul_forward.out": matmul("np.matmul(inp, weight.T", "inputs × weights", "inp", 1, "weight", 1),
  "matmul_backward.dinp": matmul("np.matmul(dout, weight", "all outputs that it went into", "dout", 1, "weight", 0),
  "matmul_backward.dweight": matmul("np.matmul(dout.T", "all positions that it was used at", "dout", 0, "inp", 0),
  "matmul_backward.dbias": ["out=dbias", columnSum],
  "norm_forward.mean": ["np.add.reduce(inp", (c, t) =>
    is("divided by C", sum("the row", c.C, i => c.inp.num(t, i)) / c.C)],
  "norm_forward.rstd": ["np.reciprocal(rstd", (c, t) => inverseSize(c.inp, t, 0, c.C, c.mean?.num(t) ?? 0, c.eps)],
  "norm_forward.out": ["out *= rstd|np.multiply(inp", (c, t, j) =>
    normalized(c, t, j) * c.weight.num(j) + (c.bias?.num(j) ?? 0)],
  "norm_backward.dinp": ["dinp[r] += dn", (c, t, j) => {
    const dn = i => is("dn = dout × weight", c.dout.num(t, i) * c.weight.num(i)), own = dn(j), n = normalized(c, t, j);
    const mean = c.mean ? shared(c, t, "mean of dn over the row", () => sum("", c.C, dn) / c.C) : 0;
    const all = shared(c, t, "mean of dn × n over the row", () => sum("", c.C, i => dn(i) * normalized(c, t, i)) / c.C);
    const words = `rstd × (dn ${c.mean ? "− mean of dn " : ""}− n × mean of dn × n)`;
    return is(words, c.rstd.data[t] * (own - mean - n * all)) + (c.ins.dinp?.num(t, j) ?? 0);
  }],
  "norm_backward.dweight": ["dweight +=", (c, j) => sum("dout × n, the normalized input, at all positions", T, t =>
    c.dout.num(t, j) * is("n", quietly(() => normalized(c, t, j))))],
  "norm_backward.dbias": ["dbias +=", columnSum],
  "residual_forward.out": ["np.add(inp1", (c, t, j) => c.inp1.num(t, j) + c.inp2.num(t, j)],
  "attention_forward.preatt": ["np.matmul(query[b]", score],
  "attention_forward.att": ["np.exp(a", causal(0, (c, h, t, t2) =>
    softmax(c, h * T + t, t + 1, x => c.preatt ? c.preatt.num(h, t, x) : score(c, h, t, x), t2))],
  "attention_forward.out": ["np.matmul(a, value[b]", (c, t, j) => {
    const h = Math.floor(j / c.HS), channel = value(c, h) + j % c.HS;
    return sum("probabilities × values", t + 1, x => c.att.num(h, t, x) * c.inp.num(x, channel));
  }],
  "attention_backward.datt": ["out=da)|d *= scale", (c, ...index) =>  // Llama's becomes the scores' gradient, in place
    (c.outs.dpreatt ? gradientOfAtt : gradientOfScore)(c, ...index)],
  "attention_backward.dpreatt": ["dp *= scale", gradientOfScore],
  "attention_backward.dinp": [(c, t, j) => `out=d${["query", "key", "value"][whose(c, j)]}`, gradientOfQkv],
  "rope_forward.qkv": rotation("a[...], b[...]", "qkv", 1),
  "rope_backward.dqkv": rotation("rope_forward(dqkv", "dqkv", -1),
  "qknorm_forward.rstd": ["rstd[...] =", (c, t, h) => inverseSize(c.ins.qkv, t, h * c.HS, c.HS, 0, 2 ** -23)],
  "qknorm_forward.qkv": ["heads *= rstd", (c, t, j) => {
    const h = Math.floor(j / c.HS), x = c.ins.qkv.num(t, j);
    if (h >= 2 * c.NH) return is("a value: it is not normalized", x);
    return x * c.rstd.num(t, h) * (h < c.NH ? is("a query: × 0.12 √HS", .12 * Math.sqrt(c.HS)) : 1);
  }],
  "qknorm_backward.dqkv": ["d -= out", (c, t, j) => {
    const { dqkv, qkv } = c.ins, h = Math.floor(j / c.HS), start = h * c.HS, d = dqkv.num(t, j);
    if (h >= 2 * c.NH) return is("a value: it was not normalized", d);
    const scale = is("the scale", h < c.NH ? .12 * Math.sqrt(c.HS) : 1), y = qkv.num(t, j);
    const all = sum("gradients × results of the head", c.HS, i => dqkv.num(t, start + i) * qkv.num(t, start + i));
    const words = "scale × gradient − result × the mean of that / scale";
    return is(words, scale * d - y * all / c.HS / scale) * c.rstd.num(t, h);
  }],
  "gelu_forward.out": apply("np.tanh(", "x/2 × (1 + tanh(√(2/π) (x + 0.044715 x³)))", x => x / 2 * (1 + bend(x))),
  "gelu_backward.dinp": apply("out=dinp[start:stop]", "GELU's slope at x", geluSlope, "inp", "dout"),
  "relu2_forward.out": apply("np.maximum", "max(x, 0)²", x => Math.max(0, x) ** 2),
  "relu2_backward.dinp": apply("np.multiply", "2 max(x, 0)", x => 2 * Math.max(0, x), "inp", "dout"),
  "swiglu_forward.out": ["np.divide(gate", (c, t, j) => {
    const up = c.inp.num(t, j), gate = c.inp.num(t, c.F + j);
    return is("up × gate × sigmoid(gate)", up * gate * sigmoid(gate));
  }],
  "swiglu_backward.dinp": ["dup *= d", (c, t, j) => {
    const i = j % c.F, d = c.dout.num(t, i), up = c.inp.num(t, i), gate = c.inp.num(t, c.F + i);
    const s = is("s = sigmoid(gate)", sigmoid(gate));
    return j < c.F ? is("dout × gate × s", d * gate * s)
      : is("dout × up × s × (1 + gate × (1 − s))", d * up * s * (1 + gate * (1 - s)));
  }],
  "cap_forward.logits": apply("z[start", "15 x / √(x² + 15²)", x => 15 * x / Math.hypot(x, 15), "logits"),
  "cap_backward.dlogits": apply("inverse * np.sqrt", "the cap's slope, (1 − (x / 15)²)^1.5",
    x => (1 - (x / 15) ** 2) ** 1.5, "logits", "dlogits"),
  "softmax_forward.probs": ["np.exp(p", (c, t, j) => softmax(c, t, c.V, i => c.logits.num(t, i), j)],
  "crossentropy_forward.losses": ["np.negative(np.log", (c, t) =>
    is("−log of it", -Math.log(c.probs.num(t, targets[t])))],
  "crossentropy_softmax_backward.dlogits": ["np.multiply(probs", (c, t, j) => {
    const p = c.probs.num(t, j), came = is("1 if this token came, else 0", +(j === targets[t]));
    return is("probability − that", p - came) * c.dlosses.num(t);
  }],
  "adamw_update.move": ["p -= t", (c, ...index) => {
    const u = data.update, at = c.move.flat(...index), [weight] = weightAndGradient(c, index);
    const m = is(`m, the running mean of the gradient: m += ${say(1 - u.beta1)} (gradient − m)`, numbers[c.m + at]);
    const v = is(`v, the running mean of its square: v += ${say(1 - u.beta2)} (gradient² − v)`, numbers[c.v + at]);
    const a = is(`m, as if it had not begun at 0: m / (1 − ${u.beta1}^${u.step})`, m / (1 - u.beta1 ** u.step));
    const b = is(`v likewise: v / (1 − ${u.beta2}^${u.step})`, v / (1 - u.beta2 ** u.step));
    const step = is(`that m / (√ of that v + ${u.eps})`, a / (Math.sqrt(b) + u.eps));
    const decay = is(`weight decay, ${u.weight_decay} × the weight`, u.weight_decay * weight);
    return is(`−${say(c.rate)} × the sum of both`, -c.rate * (step + decay));
  }],
  "muon_update.move": ["param -= u", (c, ...index) => {
    weightAndGradient(c, index);
    return is("Muon makes all directions of m, a running mean of the gradient, equally long", c.move.num(...index));
  }],
};
