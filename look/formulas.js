"use strict";
// The page's numbers, and for each layer's function how a single number of its result is made. The data is look.py's:
// tensors, the calls that read and wrote them, the functions' source.

const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent);
const T = data.ids.length - 1, inputs = data.ids.slice(0, T), targets = data.ids.slice(1);

// ---- numbers --------------------------------------------------------------------------------------------------------

const text = $("numbers").textContent;
const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), c => c.charCodeAt(0));
const halves = new Uint16Array(bytes.buffer), singles = new Float32Array(bytes.buffer, 0, bytes.length >> 2);
const HALF = Float32Array.from({ length: 65536 }, (_, bits) => {  // float16 -> number
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, part = bits & 1023;
  if (exponent === 31) return part ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + part / 1024) : 2 ** -14 * part / 1024);
});

function floats({ at, scale, exact }, size) {
  return exact ? singles.subarray(at, at + size)
    : Float32Array.from(halves.subarray(at, at + size), half => HALF[half] * scale);
}

class Tensor {
  constructor(fields, number) {
    Object.assign(this, fields, { number, size: fields.shape.reduce((a, b) => a * b, 1) });
  }
  get data() {  // decoded, or computed, when it is first read
    const data = this.ints ?? (this.at === undefined ? this.product() : floats(this, this.size));
    Object.defineProperty(this, "data", { value: data });
    return data;
  }
  product() {  // a weight's gradient: dout^T inp
    const { dout, inp } = calls[this.by].ins, [OC, C] = this.shape, out = new Float32Array(this.size);
    for (let t = 0; t < T; t++)
      for (let j = 0; j < OC; j++)
        for (let i = 0, d = dout.data[t * OC + j]; i < C; i++) out[j * C + i] += d * inp.data[t * C + i];
    return out;
  }
  flat(index) { return index.reduce((at, i, axis) => at * this.shape[axis] + i, 0); }
  num(...index) { return this.data[this.flat(index)]; }
  get key() { return `${this.name}|${this.layer}`; }
  get title() { return (this.kind === "gradient" ? "d" : "") + this.name; }
  get isWeight() { return this.name in WEIGHTS; }
  href(index) {
    return `#${this.kind === "gradient" ? "backward" : "forward"}/${this.key}/${index.join(",")}/${this.number}`;
  }
}

const tensors = data.tensors.map((fields, number) => new Tensor(fields, number));
const WEIGHTS = Object.fromEntries(data.tensors.filter(t => t.kind === "params").map(t => [t.name, true]));
const newest = {};  // key -> the tensor after the forward pass
for (const t of tensors) if (t.kind === "acts" || t.kind === "params") newest[t.key] = t;
const pick = numbers => Object.fromEntries(Object.entries(numbers).map(([name, number]) => [name, tensors[number]]));
const gradients = pick(data.gradients), calls = data.calls.map(c => ({ ...c, ins: pick(c.ins), outs: pick(c.outs) }));

const word = id => JSON.stringify(data.vocabulary[id]).slice(1, -1);
function say(x) {  // three digits
  if (x === 0 || !isFinite(x)) return String(x).replace("-", "−");
  const size = Math.abs(x), shown = size < 1e-3 || size >= 1e5 ? x.toExponential(2) : x.toPrecision(3);
  return shown.replace(/-/g, "−");
}

// ---- formulas -------------------------------------------------------------------------------------------------------

class Explanation {  // collects the lines that explain one number
  constructor() { this.parts = []; }
  note(words) { this.parts.push({ words }); }
  is(words, value) { this.parts.push({ words, value }); return value; }
  of(tensor, ...index) {
    this.parts.push({ tensor, index, value: tensor.num(...index) });
    return tensor.num(...index);
  }
  sum(words, count, factors, label = i => String(i)) {  // factors(i): [tensor, ...index]s, whose product is added
    const rows = Array.from({ length: count }, (_, i) => {
      const values = factors(i).map(([tensor, ...index]) => ({ tensor, index, value: tensor.num(...index) }));
      return { label: label(i), values, product: values.reduce((product, x) => product * x.value, 1) };
    });
    const value = rows.reduce((total, row) => total + row.product, 0);
    this.parts.push({ words, rows, value });
    return value;
  }
}

const position = t => `${t} “${word(inputs[t])}”`;
const heads = c => ({ HS: c.n.HS ?? c.n.C / c.n.NH, NH: c.n.NH, NKV: c.n.NKV ?? c.n.NH });
function columns(c, h) {  // where head h's query, key and value begin in a row of qkv
  const { HS, NH, NKV } = heads(c), kv = Math.floor(h / (NH / NKV));
  return { q: h * HS, k: (NH + kv) * HS, v: (NH + NKV + kv) * HS, HS };
}
function score(c, e, h, t, t2) {
  if (t2 > t) return e.is("a later position: the mask", -Infinity);
  const { q, k, HS } = columns(c, h), inp = c.ins.inp;
  const sum = e.sum(`query of position ${position(t)}, times key of ${position(t2)}`, HS,
    i => [[inp, t, q + i], [inp, t2, k + i]]);
  return e.is(`times 1 / √${HS}`, sum / Math.sqrt(HS));
}
const silent = new Explanation();
function softmaxed(e, what, count, number, at, label) {
  const all = Array.from({ length: count }, (_, i) => number(i)), most = Math.max(...all);
  e.is(`the row's largest ${what}`, most);
  const total = e.is(`sum over the row of exp(${what} − largest)`,
    all.reduce((sum, x) => sum + Math.exp(x - most), 0));
  return e.is(`exp(${say(all[at])} − ${say(most)}) / ${say(total)}`, Math.exp(all[at] - most) / total);
}
function rotated(c, e, before, sign, t, j) {
  const HS = c.n.HS, { cos, sin } = c.ins;
  if (j >= c.n.heads * HS) { e.note("a value: it is not rotated"); return e.of(before, t, j); }
  const pair = Math.floor(j % HS / 2), first = j - j % 2;
  const a = e.of(before, t, first), b = e.of(before, t, first + 1);
  const x = e.of(cos, t, pair), y = sign * e.of(sin, t, pair);
  return j % 2 ? e.is("a sin + b cos", a * y + b * x) : e.is("a cos − b sin", a * x - b * y);
}
const rowMean = (e, x, t, C) => e.is("divided by C", e.sum(`sum of row ${position(t)}`, C, i => [[x, t, i]]) / C);
function normBackward(c, e, t, j, hasMean) {  // dinp += rstd (dn − mean of dn − n mean of (dn n)), dn = dout weight
  const { dout, inp, weight, mean, rstd, dinp } = c.ins, C = c.n.C, r = rstd.num(t), m = hasMean ? mean.num(t) : 0;
  const n = i => (inp.num(t, i) - m) * r, dn = i => dout.num(t, i) * weight.num(i);
  e.of(inp, t, j);
  let meanDn = 0, meanDnN = 0;
  for (let i = 0; i < C; i++) { meanDn += hasMean ? dn(i) / C : 0; meanDnN += dn(i) * n(i) / C; }
  e.is("n: it, normalized", n(j));
  e.of(dout, t, j);
  e.of(weight, j);
  e.is("dn: their product", dn(j));
  if (hasMean) e.is("mean of dn over the row", meanDn);
  e.is("mean of dn × n over the row", meanDnN);
  const own = e.is(`rstd × (dn ${hasMean ? "− mean of dn " : ""}− n × mean of dn × n)`,
    r * (dn(j) - meanDn - n(j) * meanDnN));
  return own + (dinp ? e.of(dinp, t, j) : 0);
}
function normWeight(c, e, j, hasMean) {
  const { dout, inp, mean, rstd } = c.ins;
  let total = 0;
  for (let t = 0; t < T; t++) total += dout.num(t, j) * (inp.num(t, j) - (hasMean ? mean.num(t) : 0)) * rstd.num(t);
  e.note("n is the normalized input, recomputed");
  return e.is("sum over positions of dout × n", total);
}
const S = Math.sqrt(2 / Math.PI), CUBE = 0.044715, sigmoid = x => 1 / (1 + Math.exp(-x));
function attentionScores(c, e, h, t, t2) {  // the gradient of query × key
  if (t2 > t) return e.is("a later position: masked", 0);
  const { v, HS } = columns(c, h), { dout, inp, att } = c.ins, width = h * HS;
  const datt = x => silent.sum("", HS, i => [[dout, t, width + i], [inp, x, v + i]]);
  let mean = 0;
  for (let x = 0; x <= t; x++) mean += att.num(h, t, x) * datt(x);
  e.is("datt, the gradient of this probability", datt(t2));
  e.is("sum over the row of att × datt", mean);
  const a = e.of(att, h, t, t2);
  return e.is(`att × (datt − that sum) / √${HS}`, a * (datt(t2) - mean) / Math.sqrt(HS));
}
function whose(c, j) {  // 0: channel j of qkv is a query's, 1: a key's, 2: a value's
  const { HS, NH, NKV } = heads(c);
  return (j >= NH * HS) + (j >= (NH + NKV) * HS);
}
function attentionInput(c, e, t, j) {
  const { HS, NH, NKV } = heads(c), { dout, inp, att } = c.ins, scores = c.outs.dpreatt ?? c.outs.datt;
  const part = Math.floor(j / HS), i = j % HS, every = NH / NKV;
  if (whose(c, j) === 0) {
    const { k } = columns(c, part);
    e.note(`channel ${i} of head ${part + 1}'s query`);
    return e.sum("gradients of its scores, times the keys", t + 1,
      x => [[scores, part, t, x], [inp, x, k + i]], position);
  }
  const kv = (part - NH) % NKV, isKey = whose(c, j) === 1;
  e.note(`channel ${i} of ${isKey ? "key" : "value"} head ${kv + 1}`);
  let total = 0;
  for (let h = kv * every; h < (kv + 1) * every; h++)
    total += isKey
      ? e.sum(`head ${h + 1}: gradients of its scores for this key, times the queries`, T - t,
        x => [[scores, h, t + x, t], [inp, t + x, h * HS + i]], x => position(t + x))
      : e.sum(`head ${h + 1}: probabilities of this value, times dout`, T - t,
        x => [[att, h, t + x, t], [dout, t + x, h * HS + i]], x => position(t + x));
  return total;
}

// function -> argument -> [what its source has on the line that computes it, (call, explanation, ...index) -> number]
const FORMULAS = {
  encoder_forward: {
    out: ["np.take(", (c, e, t, j) => e.of(c.ins.wte, inputs[t], j) + (c.ins.wpe ? e.of(c.ins.wpe, t, j) : 0)],
  },
  layernorm_forward: {
    mean: ["np.add.reduce(inp", (c, e, t) => rowMean(e, c.ins.inp, t, c.n.C)],
    rstd: ["np.reciprocal(rstd", (c, e, t) => {
      const { inp } = c.ins, C = c.n.C, m = e.of(c.outs.mean, t);
      let squares = 0;
      for (let i = 0; i < C; i++) squares += (inp.num(t, i) - m) ** 2 / C;
      e.is("variance: mean of (x − mean)²", squares);
      return e.is("1 / √(variance + 0.00001)", 1 / Math.sqrt(squares + 1e-5));
    }],
    out: ["out *= rstd", (c, e, t, j) => {
      const x = e.of(c.ins.inp, t, j), m = e.of(c.outs.mean, t), r = e.of(c.outs.rstd, t);
      const n = e.is("(x − mean) × rstd", (x - m) * r), w = e.of(c.ins.weight, j), b = e.of(c.ins.bias, j);
      return e.is("times weight, plus bias", n * w + b);
    }],
  },
  rmsnorm_forward: {
    rstd: ["np.reciprocal(rstd", (c, e, t) => {
      const mean = e.sum(`squares of row ${position(t)}`, c.n.C, i => [[c.ins.inp, t, i], [c.ins.inp, t, i]]) / c.n.C;
      return e.is(`1 / √(their mean + ${c.n.eps})`, 1 / Math.sqrt(mean + c.n.eps));
    }],
    out: ["np.multiply(inp", (c, e, t, j) =>
      e.of(c.ins.inp, t, j) * e.of(c.outs.rstd, t) * e.of(c.ins.weight, j)],
  },
  matmul_forward: {
    out: ["np.matmul(inp, weight.T", (c, e, t, j) => {
      const { inp, weight, bias } = c.ins;
      const sum = e.sum(`row ${position(t)} of ${inp.title}, times row ${j} of ${weight.title}`, c.n.C,
        i => [[inp, t, i], [weight, j, i]]);
      return bias ? sum + e.of(bias, j) : sum;
    }],
  },
  rope_forward: { qkv: ["a[...], b[...]", (c, e, t, j) => rotated(c, e, c.ins.qkv, 1, t, j)] },
  attention_forward: {
    preatt: ["np.matmul(query[b]", score],
    att: ["np.exp(a", (c, e, h, t, t2) => {
      score(c, e, h, t, t2);
      return t2 > t ? 0 : softmaxed(e, "score", t + 1, x => score(c, silent, h, t, x), t2);
    }],
    out: ["np.matmul(a, value[b]", (c, e, t, j) => {
      const h = Math.floor(j / heads(c).HS), { v, HS } = columns(c, h);
      return e.sum(`head ${h + 1}: probabilities, times the values`, t + 1,
        x => [[c.outs.att, h, t, x], [c.ins.inp, x, v + j % HS]], position);
    }],
  },
  residual_forward: { out: ["np.add(inp1", (c, e, ...at) => e.of(c.ins.inp1, ...at) + e.of(c.ins.inp2, ...at)] },
  qknorm_forward: {
    rstd: ["rstd[...] =", (c, e, t, h) => {
      const { HS } = c.n, x = c.ins.qkv;
      const mean = e.sum("squares of the head", HS, i => [[x, t, h * HS + i], [x, t, h * HS + i]]) / HS;
      return e.is("1 / √(their mean)", 1 / Math.sqrt(mean + 2 ** -23));
    }],
    qkv: ["heads *= rstd", (c, e, t, j) => {
      const h = Math.floor(j / c.n.HS), x = e.of(c.ins.qkv, t, j);
      if (h >= 2 * c.n.NH) return e.is("a value: it is not normalized", x);
      const y = e.is("times rstd", x * e.of(c.outs.rstd, t, h));
      return h < c.n.NH ? e.is("a query: times 0.12 √HS", y * .12 * Math.sqrt(c.n.HS)) : y;
    }],
  },
  relu2_forward: {
    out: ["np.maximum", (c, e, ...at) => e.is("max(x, 0)²", Math.max(0, e.of(c.ins.inp, ...at)) ** 2)],
  },
  relu2_backward: {
    dinp: ["np.multiply", (c, e, ...at) =>
      e.of(c.ins.dout, ...at) * e.is("2 max(x, 0)", 2 * Math.max(0, e.of(c.ins.inp, ...at)))],
  },
  cap_forward: {
    logits: ["z[start:stop] /=", (c, e, t, j) => {
      const z = e.of(c.ins.logits, t, j);
      return e.is("15 z / √(z² + 15²)", 15 * z / Math.hypot(z, 15));
    }],
  },
  cap_backward: {
    dlogits: ["inverse * np.sqrt", (c, e, t, j) => {
      const d = e.of(c.ins.dlogits, t, j), y = e.of(c.ins.logits, t, j);
      return d * e.is("the cap's slope, (1 − (y / 15)²)^1.5", (1 - (y / 15) ** 2) ** 1.5);
    }],
  },
  qknorm_backward: {
    dqkv: ["d -= out", (c, e, t, j) => {
      const { HS, NH } = c.n, { dqkv, qkv, rstd } = c.ins, h = Math.floor(j / HS), d = e.of(dqkv, t, j);
      if (h >= 2 * NH) return e.is("a value: it was not normalized", d);
      const scale = h < NH ? .12 * Math.sqrt(HS) : 1, y = e.of(qkv, t, j);
      const mean = e.sum("gradient times result, over the head", HS,
        i => [[dqkv, t, h * HS + i], [qkv, t, h * HS + i]]) / HS;
      const words = `${say(scale)} × gradient − result × the mean of that / ${say(scale)}`;
      return e.of(rstd, t, h) * e.is(words, scale * d - y * mean / scale);
    }],
  },
  gelu_forward: {
    out: ["np.tanh(", (c, e, ...at) => {
      const x = e.of(c.ins.inp, ...at);
      const h = e.is("tanh(√(2/π) (x + 0.044715 x³))", Math.tanh(S * (x + CUBE * x ** 3)));
      return e.is("x/2 × (1 + that)", x / 2 * (1 + h));
    }],
  },
  swiglu_forward: {
    out: ["np.divide(gate", (c, e, t, j) => {
      const up = e.of(c.ins.inp, t, j), gate = e.of(c.ins.inp, t, c.n.F + j);
      return e.is("up × gate × sigmoid(gate)", up * gate * sigmoid(gate));
    }],
  },
  softmax_forward: {
    probs: ["np.exp(p", (c, e, t, j) => {
      e.of(c.ins.logits, t, j);
      return softmaxed(e, "logit", c.n.V, i => c.ins.logits.num(t, i), j);
    }],
  },
  crossentropy_forward: {
    losses: ["np.negative(np.log", (c, e, t) => {
      e.note(`the next token is “${word(targets[t])}”`);
      return e.is("−log of its probability", -Math.log(e.of(c.ins.probs, t, targets[t])));
    }],
  },
  crossentropy_softmax_backward: {
    dlogits: ["np.multiply(probs", (c, e, t, j) => {
      const p = e.of(c.ins.probs, t, j), d = e.of(c.ins.dlosses, t), is = j === targets[t] ? 1 : 0;
      e.note(`“${word(j)}” is ${is ? "" : "not "}the next token`);
      return e.is(`(probability − ${is}) × dloss`, (p - is) * d);
    }],
  },
  matmul_backward: {
    dinp: ["np.matmul(dout, weight", (c, e, t, i) =>
      e.sum(`all outputs that it went into`, c.n.OC, j => [[c.ins.dout, t, j], [c.ins.weight, j, i]])],
    dweight: ["np.matmul(dout.T", (c, e, j, i) =>
      e.sum("all positions that it was used at", T, t => [[c.ins.dout, t, j], [c.ins.inp, t, i]], position)],
    dbias: ["out=dbias", (c, e, j) => e.sum("all positions", T, t => [[c.ins.dout, t, j]], position)],
  },
  layernorm_backward: {
    dinp: ["dinp[r] += dn", (c, e, t, j) => normBackward(c, e, t, j, true)],
    dweight: ["dweight +=", (c, e, j) => normWeight(c, e, j, true)],
    dbias: ["dbias +=", (c, e, j) => e.sum("all positions", T, t => [[c.ins.dout, t, j]], position)],
  },
  rmsnorm_backward: {
    dinp: ["dinp[r] += dn", (c, e, t, j) => normBackward(c, e, t, j, false)],
    dweight: ["dweight +=", (c, e, j) => normWeight(c, e, j, false)],
  },
  gelu_backward: {
    dinp: ["out=dinp[start:stop]", (c, e, ...at) => {
      const d = e.of(c.ins.dout, ...at), x = e.of(c.ins.inp, ...at), h = Math.tanh(S * (x + CUBE * x ** 3));
      const slope = (1 + h) / 2 + x / 2 * (1 - h * h) * S * (1 + 3 * CUBE * x * x);
      return d * e.is("GELU's slope at x", slope);
    }],
  },
  swiglu_backward: {
    dinp: ["dup *= d", (c, e, t, j) => {
      const F = c.n.F, i = j % F, d = e.of(c.ins.dout, t, i), up = e.of(c.ins.inp, t, i);
      const gate = e.of(c.ins.inp, t, F + i), s = e.is("s = sigmoid(gate)", sigmoid(gate));
      return j < F ? e.is("dout × gate × s", d * gate * s)
        : e.is("dout × up × s × (1 + gate × (1 − s))", d * up * s * (1 + gate * (1 - s)));
    }],
  },
  attention_backward: {
    dpreatt: ["dp *= scale", attentionScores],
    datt: ["out=da)|d *= scale", (c, e, h, t, t2) => {
      if (!c.outs.dpreatt) return attentionScores(c, e, h, t, t2);
      const { v, HS } = columns(c, h);
      return e.sum("gradient of the head's output, times the value", HS,
        i => [[c.ins.dout, t, h * HS + i], [c.ins.inp, t2, v + i]]);
    }],
    dinp: [(c, t, j) => `out=d${["query", "key", "value"][whose(c, j)]}`, attentionInput],
  },
  rope_backward: { dqkv: ["rope_forward(dqkv", (c, e, t, j) => rotated(c, e, c.ins.dqkv, -1, t, j)] },
  encoder_backward: {
    dwte: ["dwte[tokens", (c, e, id, j) => {
      const at = inputs.map((x, t) => x === id ? t : -1).filter(t => t >= 0);
      const sum = e.sum(`the positions with “${word(id)}”`, at.length, i => [[c.ins.dout, at[i], j]],
        i => position(at[i]));
      return sum + (c.ins.dwte ? e.of(c.ins.dwte, id, j) : 0);
    }],
    dwpe: ["np.add.reduce(dout", (c, e, t, j) => t < T ? e.of(c.ins.dout, t, j) : e.is("no token is there", 0)],
  },
};

function explain(tensor, index) {  // -> Explanation with .value and .mark, or null for what no call wrote
  if (tensor.by === null) return null;
  const c = calls[tensor.by], [mark, formula] = FORMULAS[c.f][tensor.arg], e = new Explanation();
  return Object.assign(e, { value: formula(c, e, ...index), f: c.f, mark: mark.call ? mark(c, ...index) : mark });
}

function explainMove(key, k) {  // AdamW's move of a weight
  const u = data.update, { at, values } = u.tensors[key], e = new Explanation();
  const [moved, g, m, v] = values.map(x => floats(x, at.length)[k]), weight = newest[key], C = weight.shape[1];
  const index = C ? [Math.floor(at[k] / C), at[k] % C] : [at[k]], w = e.of(weight, ...index);
  e.note("g, its gradient:");
  e.of(gradients[key], ...index);
  if (u.tensors[key].rate === null) {
    e.note("Muon moves the whole matrix: it makes all directions of m, a running mean of g, equally long.");
    return Object.assign(e, { value: e.is("the weight moves by", moved), moved, f: "muon_update", mark: "param -= u" });
  }
  e.is("m, the running mean of g, before", (m - (1 - u.beta1) * g) / u.beta1);
  e.is(`and after: m += ${say(1 - u.beta1)} (g − m)`, m);
  e.is("v, the running mean of g², before", (v - (1 - u.beta2) * g * g) / u.beta2);
  e.is(`and after: v += ${say(1 - u.beta2)} (g² − v)`, v);
  e.note("A weight moves far where g is large beside the √v that it has had.");
  const a = e.is(`m, as if it had not begun at 0: m / (1 − ${u.beta1}^${u.step})`, m / (1 - u.beta1 ** u.step));
  const b = e.is(`v likewise: v / (1 − ${u.beta2}^${u.step})`, v / (1 - u.beta2 ** u.step));
  const rate = u.tensors[key].rate, value = -rate * (a / (Math.sqrt(b) + u.eps) + u.weight_decay * w);
  const decay = u.weight_decay ? ` + ${u.weight_decay} × the weight` : "";
  e.is(`−${say(rate)} × (that m / (√ of that v + ${u.eps})${decay})`, value);
  return Object.assign(e, { value, moved, f: "adamw_update", mark: "p -= t" });
}
