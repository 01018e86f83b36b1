"use strict";
// The page's numbers. Stored are the weights; every other tensor is computed, when it is first read, by the formulas
// below: for each layer's function, how one number of its result is made. Where a number is explained, the same formula
// is followed step by step. The data is look.py's: tensors, the calls that read and wrote them, the functions' source.

const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent);
const T = data.ids.length - 1, inputs = data.ids.slice(0, T), targets = data.ids.slice(1);
const list = (count, f) => Array.from({ length: count }, (_, i) => f(i));

// ---- numbers --------------------------------------------------------------------------------------------------------

let numbers;  // what look.py's Numbers holds, all float32
async function unpack() {
  const characters = new TextDecoder("windows-1252").decode(Uint8Array.from(list(256, byte => byte)));
  const byteOf = new Uint8Array(65536), text = $("numbers").textContent, packed = new Uint8Array(text.length);
  for (let byte = 0; byte < 256; byte++) byteOf[characters.charCodeAt(byte)] = byte;
  let length = 0;
  for (let i = 0; i < text.length; i++)
    packed[length++] = text[i] === "=" ? text.charCodeAt(++i) ^ 64 : byteOf[text.charCodeAt(i)];
  const stream = new Blob([packed.subarray(0, length)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer()), count = planes.length / 4;
  numbers = new Float32Array(count);
  const all = new Uint8Array(numbers.buffer);
  for (let i = 0; i < count; i++) for (let byte = 0; byte < 4; byte++) all[4 * i + byte] = planes[byte * count + i];
}
const stored = (at, size) => numbers.subarray(at, at + size);

const PREFIX = { forward: "", backward: "d", update: "Δ" };
class Tensor {
  constructor(fields, number) {
    const [I, J = 1, K = 1] = fields.shape, key = `${fields.name}|${fields.layer}`;
    const mode = { gradient: "backward", move: "update" }[fields.kind] ?? "forward", title = PREFIX[mode] + fields.name;
    Object.assign(this, fields, { number, key, mode, title, size: I * J * K, strides: [J * K, K, 1] });
  }
  get data() { return this.numbers ??= this.at === null ? this.computed() : stored(this.at, this.size); }
  computed() {
    const c = calls[this.by], [, formula, terms] = FORMULAS[c.f][this.arg], [I, J = 1, K = 1] = this.shape;
    if (terms) return product(c, terms, I, J);
    const numbers = new Float32Array(this.size);
    for (let i = 0, at = 0; i < I; i++)
      for (let j = 0; j < J; j++)
        for (let k = 0; k < K; k++) numbers[at++] = formula(c, silent, i, j, k);
    return numbers;
  }
  flat(i, j = 0, k = 0) { return this.strides[0] * i + this.strides[1] * j + this.strides[2] * k; }
  num(i, j, k) { return this.data[this.flat(i, j, k)]; }
  get isWeight() { return weights.has(this.name); }  // or a weight's gradient, or its move
  get axes() {  // what its indices count
    const first = /^(wte|lm_head)/.test(this.name) ? "token" : this.name === "wpe" ? "position" : "output";
    if (this.isWeight) return this.shape.length > 1 ? [first, first === "output" ? "input" : "channel"] : ["channel"];
    return this.shape.length === 3 ? ["head", "position", "looks at"]
      : ["position", /^(logits|probs)$/.test(this.name) ? "token" : "channel"].slice(0, this.shape.length);
  }
  inWhole(index) { return index.map((i, axis) => this.whole?.[axis][i] ?? i); }  // a move has some rows and columns
  label(index) { return `${this.title}[${this.inWhole(index).join(", ")}]`; }
  inWords(axis, index) {
    const what = this.axes[axis], i = this.inWhole(index)[axis];
    return what === "token" ? `token “${word(i)}”` : what === "head" ? `head ${i + 1}`
      : /position|looks at/.test(what) && i < T ? `${what} ${position(i)}` : `${what} ${i}`;
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
  return { HS: C / NH, NKV: NH, eps: 1e-5, ...sizes, ...after, ...before, f, ins: before, outs: after };
});

const word = id => JSON.stringify(data.vocabulary[id]).slice(1, -1);
const position = t => `${t} “${word(inputs[t])}”`;
function say(x) {  // three digits
  const size = Math.abs(x), isPlain = size >= 1e-3 && size < 1e5 || x === 0 || !isFinite(x);
  return (x === 0 ? "0" : isPlain ? x.toPrecision(3) : x.toExponential(2)).replaceAll("-", "−");
}

// ---- arithmetic: what the formulas are made of ----------------------------------------------------------------------

// Of a sum, a and b are [tensor, axis, ...index]: count numbers along the axis, from the index on.
class Arithmetic {
  of(tensor, i, j, k) { return tensor.num(i, j, k); }
  is(words, value) { return value; }
  sum(words, count, a, b) {
    const x = a[0].data, dp = a[0].strides[a[1]], y = b ? b[0].data : ONE, dq = b ? b[0].strides[b[1]] : 0;
    let sum = 0, p = a[0].flat(a[2], a[3], a[4]), q = b ? b[0].flat(b[2], b[3], b[4]) : 0;
    for (let i = 0; i < count; i++, p += dp, q += dq) sum += x[p] * y[q];
    return sum;
  }
}
const silent = new Arithmetic(), ONE = new Float32Array([1]);

// A matmul: for one number, terms(call, i, j) is what sum() takes. All I x J are made in blocks of 2 x 2, which read
// what they share once: that is twice as fast.
const matmul = (mark, words, terms) => [mark, (c, e, i, j) =>
  e.sum(words, ...terms(c, i, j)) + (c.bias ? e.of(c.bias, j) : 0), terms];

function product(c, terms, I, J) {
  const [count, a, b] = terms(c, 0, 0), x = a[0].data, y = b[0].data, out = new Float32Array(I * J);
  const dp = a[0].strides[a[1]], dq = b[0].strides[b[1]], start = ([tensor, , ...index]) => tensor.flat(...index);
  const ps = list(I, i => start(terms(c, i, 0)[1])), qs = list(J, j => start(terms(c, 0, j)[2]));
  for (let i = 0; i < I; i += 2) for (let j = 0; j < J; j += 2) {
    const i2 = Math.min(i + 1, I - 1), j2 = Math.min(j + 1, J - 1), down = ps[i2] - ps[i], right = qs[j2] - qs[j];
    let own = 0, below = 0, beside = 0, across = 0;
    for (let k = 0, p = ps[i], q = qs[j]; k < count; k++, p += dp, q += dq) {
      const x1 = x[p], x2 = x[p + down], y1 = y[q], y2 = y[q + right];
      own += x1 * y1;
      below += x2 * y1;
      beside += x1 * y2;
      across += x2 * y2;
    }
    out[i2 * J + j2] = across;
    out[i2 * J + j] = below;
    out[i * J + j2] = beside;
    out[i * J + j] = own;
  }
  return c.bias ? out.map((number, at) => number + c.bias.num(at % J)) : out;
}

class Explanation extends Arithmetic {  // also remembers each part
  parts = [];
  add(part) {
    this.parts.push(part);
    return part.value;
  }
  of(tensor, ...index) { return this.add({ tensor, index, value: tensor.num(...index) }); }
  is(words, value) { return this.add({ words, value }); }
  sum(words, count, ...factors) {
    const rows = list(count, i => factors.map(([tensor, axis, ...start]) => {
      const index = start.with(axis, start[axis] + i);
      return { tensor, index, label: tensor.inWords(axis, index), value: tensor.num(...index) };
    }));
    return this.add({ words, rows, value: super.sum(words, count, ...factors) });
  }
}

function once(c, row, make) { return (c.rows ??= [])[row] ??= make(); }  // what a call's formulas need of a whole row

function total(count, number) {
  let sum = 0;
  for (let i = 0; i < count; i++) sum += number(i);
  return sum;
}

function softmax(c, e, x, row, count, number) {
  const [most, sum] = once(c, row, () => {
    const all = list(count, number), most = Math.max(...all);
    return [most, total(count, i => Math.exp(all[i] - most))];
  });
  e.is("the row's largest", most);
  e.is("sum over the row of exp(number − largest)", sum);
  return e.is("exp(its number − largest) / that sum", Math.exp(x - most) / sum);
}

// A function of one number, and the gradient through it: [what its source has, formula].
const apply = (mark, words, f, arg = "inp") => [mark, (c, e, t, j) => e.is(words, f(e.of(c.ins[arg], t, j)))];
const slope = (mark, words, f, arg = "inp", dout = "dout") =>
  [mark, (c, e, t, j) => e.of(c.ins[dout], t, j) * e.is(words, f(e.of(c.ins[arg], t, j)))];

const S = Math.sqrt(2 / Math.PI), CUBE = 0.044715, bend = x => Math.tanh(S * (x + CUBE * x * x * x));
const gelu = x => x / 2 * (1 + bend(x));
const geluSlope = x => (1 + bend(x)) / 2 + x / 2 * (1 - bend(x) ** 2) * S * (1 + 3 * CUBE * x * x);
const sigmoid = x => 1 / (1 + Math.exp(-x));

// ---- norms ----------------------------------------------------------------------------------------------------------

function normalized(c, e, t, j) {
  const x = e.of(c.inp, t, j), r = e.of(c.rstd, t);
  return c.mean ? e.is("(x − mean) × rstd", (x - e.of(c.mean, t)) * r) : e.is("x × rstd", x * r);
}
const NORM = {
  mean: ["np.add.reduce(inp", (c, e, t) => e.is("divided by C", e.sum("the row", c.C, [c.inp, 1, t, 0]) / c.C)],
  rstd: ["np.reciprocal(rstd", (c, e, t) => {
    const m = c.mean ? e.of(c.mean, t) : 0, squares = total(c.C, i => (c.inp.num(t, i) - m) ** 2);
    const variance = e.is(`mean of ${c.mean ? "(x − mean)²" : "x²"} over the row`, squares / c.C);
    return e.is(`1 / √(that + ${c.eps})`, 1 / Math.sqrt(variance + c.eps));
  }],
  out: ["out *= rstd|np.multiply(inp", (c, e, t, j) =>
    normalized(c, e, t, j) * e.of(c.weight, j) + (c.bias ? e.of(c.bias, j) : 0)],
};
const DBIAS = (c, e, j) => e.sum("all positions", T, [c.dout, 0, 0, j]);
const NORM_BACKWARD = {  // dinp += rstd (dn − mean of dn − n × mean of dn n): n is the normalized x, dn = dout × weight
  dinp: ["dinp[r] += dn", (c, e, t, j) => {
    const dn = (e, i) => e.is("dn = dout × weight", e.of(c.dout, t, i) * e.of(c.weight, i));
    const [mean, meanN] = once(c, t, () => [c.mean ? total(c.C, i => dn(silent, i)) / c.C : 0,
      total(c.C, i => dn(silent, i) * normalized(c, silent, t, i)) / c.C]);
    const n = normalized(c, e, t, j), own = dn(e, j);
    if (c.mean) e.is("mean of dn over the row", mean);
    e.is("mean of dn × n over the row, where n is the normalized x", meanN);
    const words = `rstd × (dn ${c.mean ? "− mean of dn " : ""}− n × mean of dn × n)`;
    return e.is(words, c.rstd.num(t) * (own - mean - n * meanN)) + (c.ins.dinp ? e.of(c.ins.dinp, t, j) : 0);
  }],
  dweight: ["dweight +=", (c, e, j) => e.is("sum over positions of dout × the normalized x",
    total(T, t => c.dout.num(t, j) * normalized(c, silent, t, j)))],
  dbias: ["dbias +=", DBIAS],
};

// ---- attention ------------------------------------------------------------------------------------------------------

// Where the query, key and value of head h begin in a row of qkv. Several query heads may share a key and value head.
const query = (c, h) => h * c.HS, key = (c, h) => (c.NH + Math.floor(h * c.NKV / c.NH)) * c.HS;
const value = (c, h) => key(c, h) + c.NKV * c.HS;
const whose = (c, j) => (j >= c.NH * c.HS) + (j >= (c.NH + c.NKV) * c.HS);  // a query's channel, a key's, a value's

function score(c, e, h, t, t2) {
  if (t2 > t) return e.is("a later position: masked", -Infinity);
  const sum = e.sum("query × key", c.HS, [c.inp, 1, t, query(c, h)], [c.inp, 1, t2, key(c, h)]);
  return e.is(`divided by √${c.HS}`, sum / Math.sqrt(c.HS));
}
function probability(c, e, h, t, t2) {
  if (t2 > t) return e.is("a later position: masked", 0);
  const scored = (e, x) => c.preatt ? e.of(c.preatt, h, t, x) : score(c, e, h, t, x);
  return softmax(c, e, scored(e, t2), h * T + t, t + 1, x => scored(silent, x));
}
const gradientOfAtt = (c, e, h, t, t2) =>
  e.sum("gradient of the head's output × value", c.HS, [c.dout, 1, t, query(c, h)], [c.inp, 1, t2, value(c, h)]);
function gradientOfScore(c, e, h, t, t2) {
  if (t2 > t) return e.is("a later position: masked", 0);
  const datt = (e, x) => c.outs.dpreatt ? e.of(c.outs.datt, h, t, x) : gradientOfAtt(c, e, h, t, x);
  const sum = once(c, h * T + t, () => total(t + 1, x => c.att.num(h, t, x) * datt(silent, x)));
  const own = datt(e, t2), a = e.of(c.att, h, t, t2);
  e.is("sum over the row of att × datt", sum);
  return e.is(`att × (datt − that sum) / √${c.HS}`, a * (own - sum) / Math.sqrt(c.HS));
}
function gradientOfQkv(c, e, t, j) {
  const { HS, NH, NKV } = c, scores = c.outs.dpreatt ?? c.outs.datt, head = Math.floor(j / HS), i = j % HS;
  if (whose(c, j) === 0)
    return e.sum("gradients of its scores × keys", t + 1, [scores, 2, head, t, 0], [c.inp, 0, 0, key(c, head) + i]);
  const every = NH / NKV, first = (head - NH) % NKV * every;  // the heads that share the key and value
  const [words, by, rows] = whose(c, j) === 1 ? ["gradients of its scores × queries", scores, c.inp]
    : ["probabilities × gradients of the head's output", c.att, c.dout];
  return total(every, h => e.sum(words, T - t, [by, 1, first + h, t, t], [rows, 0, t, query(c, first + h) + i]));
}
const rotation = (mark, arg, sign) => [mark, (c, e, t, j) => {
  if (j >= c.heads * c.HS) return e.is("a value: it is not rotated", e.of(c.ins[arg], t, j));
  const pair = Math.floor(j % c.HS / 2), a = e.of(c.ins[arg], t, j - j % 2), b = e.of(c.ins[arg], t, j - j % 2 + 1);
  const cos = e.of(c.cos, t, pair), sin = sign * e.of(c.sin, t, pair);
  return j % 2 ? e.is("a sin + b cos", a * sin + b * cos) : e.is("a cos − b sin", a * cos - b * sin);
}];

// ---- the optimizers -------------------------------------------------------------------------------------------------

function weightAndMoments(c, e, index) {  // the weight and its gradient, which are shown, too -> [weight, m, v]
  const whole = c.move.inWhole(index), at = c.move.flat(...index);
  const weight = e.of(newest[c.move.key], ...whole);
  e.of(shownIn.backward[c.move.key], ...whole);
  return [weight, stored(c.m + at, 1)[0], stored(c.v + at, 1)[0]];
}
function movedByAdamW(c, e, ...index) {
  const u = data.update, [weight, m, v] = weightAndMoments(c, e, index);
  e.is(`m, the running mean of the gradient: m += ${say(1 - u.beta1)} (gradient − m)`, m);
  e.is(`v, the running mean of its square: v += ${say(1 - u.beta2)} (gradient² − v)`, v);
  const a = e.is(`m, as if it had not begun at 0: m / (1 − ${u.beta1}^${u.step})`, m / (1 - u.beta1 ** u.step));
  const b = e.is(`v likewise: v / (1 − ${u.beta2}^${u.step})`, v / (1 - u.beta2 ** u.step));
  const step = e.is(`that m / (√ of that v + ${u.eps})`, a / (Math.sqrt(b) + u.eps));
  const decay = e.is(`weight decay, ${u.weight_decay} × the weight`, u.weight_decay * weight);
  return e.is(`−${say(c.rate)} × the sum of both`, -c.rate * (step + decay));
}
function movedByMuon(c, e, ...index) {
  weightAndMoments(c, e, index);
  return e.is("Muon makes all directions of m, a running mean of the gradient, equally long", c.move.num(...index));
}

// ---- the table ------------------------------------------------------------------------------------------------------

const positionsOf = {};  // token -> where it is in the prompt
inputs.forEach((id, t) => (positionsOf[id] ??= []).push(t));

// function -> argument -> [what its source has on the line that computes it, (call, e, ...index) -> number]
const FORMULAS = {
  encoder_forward: {
    out: ["np.take(", (c, e, t, j) => e.of(c.wte, inputs[t], j) + (c.wpe ? e.of(c.wpe, t, j) : 0)],
  },
  encoder_backward: {
    dwte: ["dwte[tokens", (c, e, id, j) => {
      const at = positionsOf[id] ?? [], before = c.ins.dwte ? e.of(c.ins.dwte, id, j) : 0;
      e.is("positions with this token", at.length);
      return total(at.length, i => e.of(c.dout, at[i], j)) + before;
    }],
    dwpe: ["np.add.reduce(dout", (c, e, t, j) => t < T ? e.of(c.dout, t, j) : e.is("no token is there", 0)],
  },
  matmul_forward: {
    out: matmul("np.matmul(inp, weight.T", "inputs × weights",
      (c, t, j) => [c.C, [c.inp, 1, t, 0], [c.weight, 1, j, 0]]),
  },
  matmul_backward: {
    dinp: matmul("np.matmul(dout, weight", "all outputs that it went into",
      (c, t, i) => [c.OC, [c.dout, 1, t, 0], [c.weight, 0, 0, i]]),
    dweight: matmul("np.matmul(dout.T", "all positions that it was used at",
      (c, j, i) => [T, [c.dout, 0, 0, j], [c.inp, 0, 0, i]]),
    dbias: ["out=dbias", DBIAS],
  },
  layernorm_forward: NORM, layernorm_backward: NORM_BACKWARD,
  rmsnorm_forward: NORM, rmsnorm_backward: NORM_BACKWARD,
  residual_forward: { out: ["np.add(inp1", (c, e, t, j) => e.of(c.inp1, t, j) + e.of(c.inp2, t, j)] },
  attention_forward: {
    preatt: ["np.matmul(query[b]", score],
    att: ["np.exp(a", probability],
    out: ["np.matmul(a, value[b]", (c, e, t, j) => {
      const h = Math.floor(j / c.HS);
      return e.sum("probabilities × values", t + 1, [c.att, 2, h, t, 0], [c.inp, 0, 0, value(c, h) + j % c.HS]);
    }],
  },
  attention_backward: {  // Llama's datt becomes the gradient of the scores, in place
    datt: ["out=da)|d *= scale", (c, ...rest) => (c.outs.dpreatt ? gradientOfAtt : gradientOfScore)(c, ...rest)],
    dpreatt: ["dp *= scale", gradientOfScore],
    dinp: [(c, t, j) => `out=d${["query", "key", "value"][whose(c, j)]}`, gradientOfQkv],
  },
  rope_forward: { qkv: rotation("a[...], b[...]", "qkv", 1) },
  rope_backward: { dqkv: rotation("rope_forward(dqkv", "dqkv", -1) },
  qknorm_forward: {
    rstd: ["rstd[...] =", (c, e, t, h) => {
      const head = [c.ins.qkv, 1, t, h * c.HS], squares = e.sum("squares of the head", c.HS, head, head);
      return e.is("1 / √(their mean)", 1 / Math.sqrt(squares / c.HS + 2 ** -23));
    }],
    qkv: ["heads *= rstd", (c, e, t, j) => {
      const h = Math.floor(j / c.HS), x = e.of(c.ins.qkv, t, j);
      if (h >= 2 * c.NH) return e.is("a value: it is not normalized", x);
      return x * e.of(c.rstd, t, h) * (h < c.NH ? e.is("a query: × 0.12 √HS", .12 * Math.sqrt(c.HS)) : 1);
    }],
  },
  qknorm_backward: {
    dqkv: ["d -= out", (c, e, t, j) => {
      const { dqkv, qkv } = c.ins, h = Math.floor(j / c.HS), start = h * c.HS, d = e.of(dqkv, t, j);
      if (h >= 2 * c.NH) return e.is("a value: it was not normalized", d);
      const scale = e.is("the scale", h < c.NH ? .12 * Math.sqrt(c.HS) : 1), y = e.of(qkv, t, j);
      const sum = e.sum("gradients × results of the head", c.HS, [dqkv, 1, t, start], [qkv, 1, t, start]);
      const words = "scale × gradient − result × the mean of that / scale";
      return e.is(words, scale * d - y * sum / c.HS / scale) * e.of(c.rstd, t, h);
    }],
  },
  gelu_forward: { out: apply("np.tanh(", "x/2 × (1 + tanh(√(2/π) (x + 0.044715 x³)))", gelu) },
  gelu_backward: { dinp: slope("out=dinp[start:stop]", "GELU's slope at x", geluSlope) },
  relu2_forward: { out: apply("np.maximum", "max(x, 0)²", x => Math.max(0, x) ** 2) },
  relu2_backward: { dinp: slope("np.multiply", "2 max(x, 0)", x => 2 * Math.max(0, x)) },
  swiglu_forward: {
    out: ["np.divide(gate", (c, e, t, j) => {
      const up = e.of(c.inp, t, j), gate = e.of(c.inp, t, c.F + j);
      return e.is("up × gate × sigmoid(gate)", up * gate * sigmoid(gate));
    }],
  },
  swiglu_backward: {
    dinp: ["dup *= d", (c, e, t, j) => {
      const i = j % c.F, d = e.of(c.dout, t, i), up = e.of(c.inp, t, i), gate = e.of(c.inp, t, c.F + i);
      const s = e.is("s = sigmoid(gate)", sigmoid(gate));
      return j < c.F ? e.is("dout × gate × s", d * gate * s)
        : e.is("dout × up × s × (1 + gate × (1 − s))", d * up * s * (1 + gate * (1 - s)));
    }],
  },
  cap_forward: { logits: apply("z[start", "15 x / √(x² + 15²)", x => 15 * x / Math.hypot(x, 15), "logits") },
  cap_backward: {
    dlogits: slope("inverse * np.sqrt", "the cap's slope, (1 − (x / 15)²)^1.5", x => (1 - (x / 15) ** 2) ** 1.5,
      "logits", "dlogits"),
  },
  softmax_forward: {
    probs: ["np.exp(p", (c, e, t, j) => softmax(c, e, e.of(c.logits, t, j), t, c.V, i => c.logits.num(t, i))],
  },
  crossentropy_forward: {
    losses: ["np.negative(np.log", (c, e, t) => e.is("−log of it", -Math.log(e.of(c.probs, t, targets[t])))],
  },
  crossentropy_softmax_backward: {
    dlogits: ["np.multiply(probs", (c, e, t, j) => {
      const p = e.of(c.probs, t, j), came = e.is("1 if this token came, else 0", +(j === targets[t]));
      return e.is("probability − that", p - came) * e.of(c.dlosses, t);
    }],
  },
  adamw_update: { move: ["p -= t", movedByAdamW] }, muon_update: { move: ["param -= u", movedByMuon] },
};

function explain(tensor, index) {  // -> Explanation with .value, and the line's .f and .mark; null: no call wrote it
  if (tensor.by === null) return null;
  const c = calls[tensor.by], [mark, formula] = FORMULAS[c.f][tensor.arg], e = new Explanation();
  return Object.assign(e, { value: formula(c, e, ...index), f: c.f, mark: mark.call ? mark(c, ...index) : mark });
}
