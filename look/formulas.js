// How one number of each layer's result is made, from what the layer reads.

// ---- what formulas share ------------------------------------------------------------------------

// Sums of products along axis p of a tensor and axis q of another: number (i, j) is of the first's
// i, the other's j.
function matmul(mark, first, p, second, q) {
  const expression = `${first} × ${second}`;
  return { mark, of: (c, i, j) => {
    const a = c[first], b = c[second];
    const total = dot("sum", expression, a.shape[p], a, i * a.strides[1 - p], a.strides[p],
      b, j * b.strides[1 - q], b.strides[q]);
    return c.bias ? is("", "sum + bias", total + c.bias.num(j)) : total;
  } };
}

const bend = (c, x) => Math.tanh(c.GELU_SCALE * (x + c.GELU_CUBE * x * x * x));
const sigmoid = x => 1 / (1 + Math.exp(-x));

function softmax(c, row, count, number, own, name) {
  const x = number(own), largest = shared(c, row, "largest", "“the row's largest”", () =>
    Math.max(...list(count, number)));
  const exp = parts && `exp(${name} − largest)`, words = parts && `“sum of the row's ${exp}”`;
  const total = shared(c, row, "total", words, () =>
    list(count, number).reduce((sum, x) => sum + Math.exp(x - largest), 0));
  return is("", parts && `${exp} / total`, Math.exp(x - largest) / total);
}

function inverseSize(c, arg, t, start, size, mean) {  // of a row, or of a head in it
  const x = c.ins[arg], count = c[size], eps = c.eps ?? c.EPS;
  const square = c.mean ? "(inp − mean)²" : `${arg}²`;
  const total = sum("squares", square, count, i => (x.num(t, start + i) - mean) ** 2);
  const expression = `1 / √(squares / ${size} + ${c.eps ? "eps" : "EPS"})`;
  return is("", expression, 1 / Math.sqrt(total / count + eps));
}
const normalized = (c, t, j) => {
  const x = c.inp.num(t, j), mean = c.mean ? c.mean.num(t) : 0;
  const expression = c.mean ? "(inp − mean) × rstd" : "inp × rstd";
  return is("n", expression, (x - mean) * c.rstd.num(t));
};
const columnSum = (c, j) => sum("sum", "dout", T, t => c.dout.num(t, j));

// Where the query, key and value of head h begin in a row of qkv. Several query heads may share a
// key and value head.
const query = (c, h) => h * c.HS, key = (c, h) => (c.NH + Math.floor(h * c.NKV / c.NH)) * c.HS;
const value = (c, h) => key(c, h) + c.NKV * c.HS;
const whose = (c, j) => (j >= c.NH * c.HS) + (j >= (c.NH + c.NKV) * c.HS);
const CHANNELS = ["query", "key", "value"];  // what a channel of qkv is of
const causal = (masked, number) => (c, h, t, t2) =>
  t2 > t ? because("a later position: masked", masked) : number(c, h, t, t2);

const score = name => (c, h, t, t2) => {
  const product = dot("product", "query × key", c.HS,
    c.inp, c.inp.flat(t, query(c, h)), 1, c.inp, c.inp.flat(t2, key(c, h)), 1);
  return is(name, "product / √HS", product / Math.sqrt(c.HS));
};
const gradientOfAtt = (c, h, t, t2) => dot("datt", "dout × value", c.HS,
  c.dout, c.dout.flat(t, query(c, h)), 1, c.inp, c.inp.flat(t2, value(c, h)), 1);
const gradientOfScore = causal(0, (c, h, t, t2) => {
  const datt = x => c.outs.dpreatt ? c.outs.datt.num(h, t, x) : gradientOfAtt(c, h, t, x);
  const att = c.att.num(h, t, t2), own = datt(t2);
  const mean = shared(c, h * T + t, "mean", "“sum of att × datt over the row”", () => {
    let sum = 0;
    for (let x = 0; x <= t; x++) sum += c.att.num(h, t, x) * datt(x);
    return sum;
  });
  return is("", "att × (datt − mean) / √HS", att * (own - mean) / Math.sqrt(c.HS));
});
function gradientOfQkv(c, t, j) {
  const { HS, NH, NKV } = c, scores = c.outs.dpreatt ?? c.outs.datt;
  const head = Math.floor(j / HS), i = j % HS;
  if (whose(c, j) === 0) return dot("sum", "score's gradient × key", t + 1,
    scores, scores.flat(head, t, 0), 1, c.inp, c.inp.flat(0, key(c, head) + i), c.inp.strides[0]);
  const every = NH / NKV, first = (head - NH) % NKV * every;  // heads that share the key and value
  const [expression, by, rows] = whose(c, j) === 1
    ? ["score's gradient × query", scores, c.inp] : ["att × dout", c.att, c.dout];
  const one = h => dot(`head ${h}`, expression, T - t, by, by.flat(h, t, t), T,
    rows, rows.flat(t, h * HS + i), rows.strides[0]);
  return every === 1 ? one(first)
    : sum("sum", "the heads that share it", every, n => one(first + n));
}
const rotation = (mark, arg, sign) => ({ mark: (c, t, j) => j < c.heads * c.HS ? mark : "pairs = ",
  why: (c, t, j) => {
    const pair = Math.floor(j % c.HS / 2);
    const angle = Math.atan2(c.sin.num(t, pair), c.cos.num(t, pair));
    return "Without it, a score would not depend on the order of tokens. RoPE turns each pair of a "
      + "query's and a key's channels by an angle that grows with the position, fast for the "
      + `first pairs: at position ${t}, this pair by ${say(angle)}, or whole turns more. The `
      + "product of a query and a key then depends on the difference of their angles: on how far "
      + "apart they are, not on where.";
  },
  of: (c, t, j) => {
    const x = c.ins[arg];
    if (j >= c.heads * c.HS) return because("a value: it is not rotated", x.num(t, j));
    const pair = Math.floor(j % c.HS / 2);
    const a = is("a", "", x.num(t, j - j % 2)), b = is("b", "", x.num(t, j - j % 2 + 1));
    const cos = c.cos.num(t, pair), sin = c.sin.num(t, pair) * sign;
    if (sign < 0) return j % 2 ? is("", "−a × sin + b × cos", a * sin + b * cos)
      : is("", "a × cos + b × sin", a * cos - b * sin);
    return j % 2 ? is("", "a × sin + b × cos", a * sin + b * cos)
      : is("", "a × cos − b × sin", a * cos - b * sin);
  } });

// The sums of products of all rows of x and all rows of y, which have K numbers: of two rows and
// four at a time, as their numbers are a multiple of four.
function products(x, y, K, isSymmetric) {
  const I = x.length / K, J = y.length / K, made = new Float32Array(I * J);
  for (let i = 0; i < I; i += 2) for (let j = isSymmetric ? i & ~3 : 0; j < J; j += 4) {
    let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
    for (let k = 0, at = i * K, to = j * K; k < K; k++, at++, to++) {
      const p = x[at], q = x[at + K];
      const r = y[to], s = y[to + K], t = y[to + 2 * K], u = y[to + 3 * K];
      a += p * r; b += p * s; c += p * t; d += p * u;
      e += q * r; f += q * s; g += q * t; h += q * u;
    }
    const at = i * J + j, to = at + J;
    made[at] = a; made[at + 1] = b; made[at + 2] = c; made[at + 3] = d;
    made[to] = e; made[to + 1] = f; made[to + 2] = g; made[to + 3] = h;
  }
  if (isSymmetric) for (let i = 0; i < I; i++)
    for (let j = 0; j < i; j++) made[i * J + j] = made[j * J + i];
  return made;
}
function turned(x, rows, columns) {
  const made = new Float32Array(x.length);
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) made[j * rows + i] = x[i * columns + j];
  return made;
}
// Muon: U V^T of a matrix (rows, columns) = U S V^T, nearly.
function orthogonalize(matrix, rows, columns, [steps, [a, b, c]]) {
  if (rows > columns) return turned(orthogonalize(turned(matrix, rows, columns), columns, rows,
    [steps, [a, b, c]]), columns, rows);
  const size = Math.sqrt(matrix.reduce((sum, x) => sum + x * x, 0)) + 1e-7;
  let x = matrix.map(number => number / size);
  for (let step = 0; step < steps; step++) {
    const square = products(x, x, columns, true), fourth = products(square, square, rows, true);
    const mixed = square.map((s, i) => b * s + c * fourth[i]);
    const more = products(mixed, turned(x, rows, columns), rows, false);
    x = x.map((number, i) => a * number + more[i]);
  }
  return x;
}
function directionsOf(c, block) {  // of a Muon step: the matrix before and after; qkvw has three
  const rows = c.param.shape[0] / c.blocks, columns = c.param.shape[1], size = rows * columns;
  return (c.shared.directions ??= [])[block] ??= quietly(() => {
    const part = x => x.data.subarray(block * size, (block + 1) * size);
    const m = part(c.outs.m), grad = part(c.grad), own = (1 - c.momentum) * c.grad_scale;
    const before = m.map((x, at) => own * grad[at] + c.momentum * x);
    const after = orthogonalize(before, rows, columns, c.newton_schulz);
    return { rows, columns, before, after };
  });
}
function direction(c, i, j) {
  const block = Math.floor(i / (c.param.shape[0] / c.blocks));
  const { rows, columns, after } = directionsOf(c, block);
  return after[(i - block * rows) * columns + j];
}
// The lengths of a matrix's directions, its singular values, by Jacobi's rotations of its rows.
function lengthsOf(matrix, rows, columns) {
  if (rows > columns) return lengthsOf(turned(matrix, rows, columns), columns, rows);
  const x = list(rows, i => Float64Array.from(matrix.subarray(i * columns, (i + 1) * columns)));
  const product = (a, b) => a.reduce((sum, number, k) => sum + number * b[k], 0);
  for (let sweep = 0; sweep < 5; sweep++)
    for (let i = 0; i < rows; i++) for (let j = 0; j < i; j++) {
      const [a, b] = [x[i], x[j]], both = product(a, b);
      const angle = Math.atan2(2 * both, product(a, a) - product(b, b)) / 2;
      const cos = Math.cos(angle), sin = Math.sin(angle);
      for (let k = 0; k < columns; k++)
        [a[k], b[k]] = [cos * a[k] + sin * b[k], cos * b[k] - sin * a[k]];
    }
  return x.map(row => Math.sqrt(product(row, row))).sort((a, b) => b - a);
}

// ---- the formulas -------------------------------------------------------------------------------

// function.argument -> mark: what its source has on the lines that compute it, or from...to;
// of: (call, ...index) -> number; why: in words; label: what a gradient is of, if of no tensor.
const FORMULAS = {
  "encoder_forward.out": { mark: c => `np.take(${c.wpe ? "|out += wpe" : ""}`,
    why: "A model reads numbers: a token is looked up as a row of weights, which training moves.",
    of: (c, t, j) => {
      const x = c.wte.num(inputs[t], j);
      return c.wpe ? is("", "wte + wpe", x + c.wpe.num(t, j)) : is("", "wte", x);
    } },
  "encoder_backward.dwte": { mark: "order =…dwte[tokens",
    why: "A row of the embedding was used wherever its token stands: it gets all their gradients.",
    of: (c, id, j) => {
      const at = positionsOf.get(id) ?? [], before = c.ins.dwte ? c.ins.dwte.num(id, j) : 0;
      const total = sum("sum", "dout", at.length, i => c.dout.num(at[i], j));
      return c.ins.dwte ? is("", "dwte + sum", before + total) : total;
    } },
  "encoder_backward.dwpe": { mark: "np.add.reduce(dout",
    of: (c, t, j) => t < T ? is("", "dout", c.dout.num(t, j)) : because("no token is there", 0) },
  "matmul_forward.out": { ...matmul(c => `np.matmul(inp, weight.T${c.bias ? "|out += bias" : ""}`,
    "inp", 1, "weight", 1),
  why: "Each row of the weight is a pattern: the more a position's numbers look like it, the "
    + "larger the result." },
  "matmul_backward.dinp": { ...matmul("np.matmul(dout, weight", "dout", 1, "weight", 0),
    why: "It went into every output, as often as a weight says: so much of each output's gradient "
      + "comes back to it." },
  "matmul_backward.dweight": { ...matmul("np.matmul(dout.T", "dout", 0, "inp", 0),
    why: "The weight multiplied its input at each position, so that is how much a change of the "
      + "weight changes each output." },
  "matmul_backward.dbias": { mark: "out=dbias", of: columnSum },
  "norm_forward.mean": { mark: "np.add.reduce(inp…np.multiply(mean", of: (c, t) =>
    is("", "sum / C", sum("sum", "inp", c.C, i => c.inp.num(t, i)) / c.C) },
  "norm_forward.rstd": {
    mark: c => c.mean ? "np.subtract(inp…np.reciprocal(rstd" : "np.vecdot(inp…np.reciprocal(rstd",
    of: (c, t) => inverseSize(c, "inp", t, 0, "C", c.mean ? c.mean.num(t) : 0) },
  "norm_forward.out": {
    mark: c => c.mean ? "np.subtract(inp|out *= rstd…out += bias" : "np.multiply(inp…out *= weight",
    why: "Each layer adds to the residual stream, which grows; a norm hands on its direction, at "
      + "one size.",
    of: (c, t, j) => {
      const n = normalized(c, t, j), weight = c.weight.num(j);
      return c.bias ? is("", "n × weight + bias", n * weight + c.bias.num(j))
        : is("", "n × weight", n * weight);
    } },
  "norm_backward.dinp": {
    mark: c => `${c.mean ? "np.subtract(inp[r]|n *= rstd[r]" : "np.multiply(inp[r]"}`
      + "|np.multiply(d, weight…dinp[r] += dn",
    why: "dn is the d of n, the normalized number. A number acts in several ways: directly (dn); "
      + "by shifting its row's mean by 1 / C, which the norm takes from all C numbers (− mean_dn; "
      + "RMSNorm has no mean); and by making its row longer, in proportion to n, for which the "
      + "norm makes all C numbers smaller, in proportion to their own n (− n × mean_dn_n).",
    of: (c, t, j) => {
      const before = c.ins.dinp ? c.ins.dinp.num(t, j) : 0;
      const dn = i => is("dn", "dout × weight", c.dout.num(t, i) * c.weight.num(i));
      const n = normalized(c, t, j), own = dn(j), rstd = c.rstd.data[t];
      const average = term => {
        let sum = 0;
        for (let i = 0; i < c.C; i++) sum += term(i);
        return sum / c.C;
      };
      const mean = c.mean ? shared(c, t, "mean_dn", "“mean of dn over the row”", () =>
        average(dn)) : 0;
      const both = shared(c, t, "mean_dn_n", "“mean of dn × n over the row”", () =>
        average(i => dn(i) * normalized(c, t, i)));
      const terms = c.mean ? "dn − mean_dn − n × mean_dn_n" : "dn − n × mean_dn_n";
      const expression = `${c.ins.dinp ? "dinp + " : ""}rstd × (${terms})`;
      return is("", expression, before + rstd * (own - mean - n * both));
    } },
  "norm_backward.dweight": { mark: "np.multiply(d, n…dweight +=", of: (c, j) =>
    sum("sum", "dout × n", T, t =>
      c.dout.num(t, j) * is("n", "", quietly(() => normalized(c, t, j)))) },
  "norm_backward.dbias": { mark: "dbias +=", of: columnSum },
  "residual_forward.out": { mark: "np.add(inp1",
    why: "A layer only adds: what the stream had stays in it, and the gradient comes back whole.",
    of: (c, t, j) => is("", "inp1 + inp2", c.inp1.num(t, j) + c.inp2.num(t, j)) },
  "attention_forward.preatt": { mark: "np.matmul(query[b]…p += mask",
    why: c => "A query is what a position asks for, a key what one up to it offers; both are made "
      + "by weights. The more they agree, channel by channel, the more the head looks there. They "
      + `have HS = ${c.HS} numbers, and a sum of so many terms grows with √HS: undivided, the `
      + "softmax would nearly always choose one position.",
    of: causal(-Infinity, score("")) },
  "attention_forward.att": {
    mark: c => c.preatt ? "np.subtract(p…a *= np.float32" : "np.matmul(query[b]…a *= np.float32",
    why: "A query is what a position asks for, a key what one up to it offers: the more they "
      + "agree, the higher the score. The softmax makes a row of scores probabilities. Subtracting "
      + "the largest changes no ratio: it keeps exp from overflowing.",
    of: causal(0, (c, h, t, t2) => c.preatt
      ? softmax(c, h * T + t, t + 1, x => c.preatt.num(h, t, x), t2, "preatt")
      : softmax(c, h * T + t, t + 1, x => score("score")(c, h, t, x), t2, "score")) },
  "attention_forward.out": { mark: "np.matmul(a, value[b]",
    why: "The head gathers the values of the positions it looks at, by how much it looks.",
    of: (c, t, j) => {
      const h = Math.floor(j / c.HS), { strides } = c.inp;
      return dot("sum", "att × value", t + 1, c.att, c.att.flat(h, t, 0), 1,
        c.inp, value(c, h) + j % c.HS, strides[0]);
    } },
  "attention_backward.datt": {  // Llama's becomes the scores' gradient, in place
    mark: c => c.outs.dpreatt ? "out=da)" : "out=d)…d *= scale",
    label: c => c.outs.dpreatt ? "" : "(query · key)",
    of: (c, h, t, t2) => (c.outs.dpreatt ? gradientOfAtt : gradientOfScore)(c, h, t, t2) },
  "attention_backward.dpreatt": { mark: "np.subtract(da…dp *= scale",
    label: () => "(query · key)",
    why: "It is of the product of query and key, before its division by √HS. A row's "
      + "probabilities sum to 1, so one can only rise as others fall: the mean is subtracted.",
    of: gradientOfScore },
  "attention_backward.dinp": {
    mark: (c, t, j) => `out=d${CHANNELS[whose(c, j)]}`,
    why: (c, t, j) => ["A query took part in the scores of its row: their d comes back to it, "
      + "times the keys.", "A key took part in the scores of every later query: their d comes back "
      + "to it, times the queries.", "A value was handed to every later position, by how much it "
      + "looked here: the d of what they gathered comes back, times that."][whose(c, j)],
    of: gradientOfQkv },
  "rope_forward.qkv": rotation("a[...], b[...]", "qkv", 1),
  "rope_backward.dqkv": { ...rotation("rope_forward(dqkv", "dqkv", -1), mark: "rope_forward(dqkv" },
  "qknorm_forward.rstd": { mark: "rstd[...] =",
    of: (c, t, h) => inverseSize(c, "qkv", t, h * c.HS, "HS", 0) },
  "qknorm_forward.qkv": {
    why: "All queries, and all keys, get one length: a score then says how well their directions "
      + "agree, and no head can shout.",
    mark: (c, t, j) =>
      ["heads *= rstd…heads[:, :, :NH]", "heads *= rstd", "heads = qkv"][whose(c, j)],
    of: (c, t, j) => {
      const h = Math.floor(j / c.HS), x = c.ins.qkv.num(t, j);
      if (h >= 2 * c.NH) return because("a value: it is not normalized", x);
      const n = x * c.rstd.num(t, h);
      return h < c.NH ? is("", "qkv × rstd × SCALE × √HS", n * c.SCALE * Math.sqrt(c.HS))
        : is("", "qkv × rstd", n);
    } },
  "qknorm_backward.dqkv": {
    mark: (c, t, j) => whose(c, j) < 2 ? "scale = np.repeat…d *= scale" : "d, out = ",
    of: (c, t, j) => {
      const { dqkv, qkv } = c.ins, h = Math.floor(j / c.HS), start = h * c.HS, d = dqkv.num(t, j);
      if (h >= 2 * c.NH) return because("a value: it was not normalized", d);
      const scale = h < c.NH ? is("scale", "SCALE × √HS", c.SCALE * Math.sqrt(c.HS))
        : is("scale", "1", 1);
      const total = dot("sum", "dqkv × qkv", c.HS, dqkv, dqkv.flat(t, start), 1,
        qkv, qkv.flat(t, start), 1);
      const y = qkv.num(t, j), rstd = c.rstd.num(t, h);
      return is("", "scale × rstd × (dqkv − qkv × sum / HS / scale²)",
        scale * rstd * (d - y * total / c.HS / scale ** 2));
    } },
  "gelu_forward.out": { mark: "np.multiply(x, x, out=y)…y *= np.float32(0.5)",
    why: "Without a bend, two matmuls in a row would be one: GELU lets a hidden number answer to a "
      + "pattern, and be silent otherwise.",
    of: (c, t, j) => {
      const x = c.inp.num(t, j);
      const b = is("bend", "tanh(GELU_SCALE × (inp + GELU_CUBE × inp³))", bend(c, x));
      return is("", "inp / 2 × (1 + bend)", x / 2 * (1 + b));
    } },
  "gelu_backward.dinp": {
    why: "A small change of what came in is multiplied by the slope of the bend there: near 0 "
      + "where the hidden number is silent, near 1 where it speaks.",
    mark: "np.multiply(x, x, out=t)…np.multiply(t, dout",
    of: (c, t, j) => {
      const x = c.inp.num(t, j), b = is("bend", "tanh(GELU_SCALE × (inp + GELU_CUBE × inp³))",
        bend(c, x));
      const inner = is("inner", "GELU_SCALE × (1 + 3 × GELU_CUBE × inp²)",
        c.GELU_SCALE * (1 + 3 * c.GELU_CUBE * x * x));
      const slope = is("slope", "(1 + bend) / 2 + inp / 2 × (1 − bend²) × inner",
        (1 + b) / 2 + x / 2 * (1 - b * b) * inner);
      return is("", "dout × slope", c.ins.dout.num(t, j) * slope);
    } },
  "relu2_forward.out": {
    why: "Only what is above 0 passes, and the more so the larger it is: most hidden numbers are "
      + "silent.", mark: "np.maximum(inp…out *= out",
    of: (c, t, j) => is("", "max(inp, 0)²", Math.max(0, c.inp.num(t, j)) ** 2) },
  "relu2_backward.dinp": { mark: "slope = …np.multiply(dout", of: (c, t, j) =>
    is("", "dout × 2 × max(inp, 0)", c.ins.dout.num(t, j) * 2 * Math.max(0, c.inp.num(t, j))) },
  "swiglu_forward.out": { mark: "np.negative(gate…o *= up",
    why: "The gate decides how much of `up` passes: each is a pattern of its own.",
    of: (c, t, j) => {
      const up = is("up", "", c.inp.num(t, j)), gate = is("gate", "", c.inp.num(t, c.F + j));
      return is("", "up × gate × sigmoid(gate)", up * gate * sigmoid(gate));
    } },
  "swiglu_backward.dinp": {
    mark: (c, t, j) => j < c.F ? "s = np.float32|np.multiply(gate, s|dup *= d"
      : "s = np.float32…dgate *= d\n",
    of: (c, t, j) => {
      const i = j % c.F, up = is("up", "", c.inp.num(t, i));
      const gate = is("gate", "", c.inp.num(t, c.F + i)), d = c.dout.num(t, i);
      const s = is("s", "sigmoid(gate)", sigmoid(gate));
      return j < c.F ? is("", "dout × gate × s", d * gate * s)
        : is("", "dout × up × s × (1 + gate × (1 − s))", d * up * s * (1 + gate * (1 - s)));
    } },
  "cap_forward.logits": {
    why: "Small logits pass nearly unchanged, none goes beyond CAP: the model cannot be too sure.",
    mark: "z[start", of: (c, t, j) => {
    const z = c.ins.logits.num(t, j);
    return is("", "logits / √(1 + (logits / CAP)²)", z / Math.sqrt(1 + (z / c.CAP) ** 2));
  } },
  "cap_backward.dlogits": { mark: "inverse = …dlogits[start", of: (c, t, j) => {
    const d = c.ins.dlogits.num(t, j), y = c.ins.logits.num(t, j);
    return is("", "dlogits × (1 − (logits / CAP)²)^1.5",
      d * Math.max(0, 1 - (y / c.CAP) ** 2) ** 1.5);
  } },
  "softmax_forward.probs": { mark: "np.subtract(x…p *=",
    why: "exp makes all numbers positive, and differences of logits ratios of probabilities.",
    of: (c, t, j) => softmax(c, t, c.V, i => c.logits.num(t, i), j, "logits") },
  "crossentropy_forward.losses": { mark: "p, tiny = |np.negative(np.log",
    why: "The loss is the surprise: 0 if the model was sure of the token that came.",
    of: (c, t) => is("", "−log(probs)", -Math.log(c.probs.num(t, targets[t]))) },
  "crossentropy_softmax_backward.dlogits": {
    mark: (c, t, j) => `np.multiply(probs${j === targets[t] ? "|d[np.arange" : ""}`,
    why: "Each probability should fall by what it is, but the right one rise to 1.",
    of: (c, t, j) => {
      const p = c.probs.num(t, j), came = j === targets[t], weight = c.dlosses.num(t);
      return came ? is("", "(probs − 1) × dlosses", (p - 1) * weight)
        : is("", "probs × dlosses", p * weight);
    } },
  "adamw_update.m": { mark: "np.subtract(g, mean…mean += t", of: (c, i, j) => mean(c, i, j, "") },
  "adamw_update.v": { mark: "np.multiply(g, g…square += t", of: (c, i, j) => square(c, i, j, "") },
  "adamw_update.move": { mark: "correction2 = |rate = |keep, scale|np.sqrt(square…p -= t",
    why: "Divided by its own size (√vhat), the mean gradient is about 1 if gradients agree, less "
      + "if they do not: so a weight moves by about the rate, whatever the gradient's size. m "
      + "keeps beta1 of itself and takes the rest of the new gradient: it is the memory of earlier "
      + "steps. As it begins at 0, it is too small at first: dividing by 1 − beta1^step mends that.",
    of: (c, i, j) => {
      if (parts) mean(c, i, j, "new_m"), square(c, i, j, "new_v");
      const m = c.outs.m.num(i, j), v = c.outs.v.num(i, j), weight = ofWeight(c, c.params, i, j);
      const one = c.shared.one ??= 1 - c.beta1 ** c.step;
      const two = c.shared.two ??= 1 - c.beta2 ** c.step;
      const mhat = is("mhat", "new_m / (1 − beta1^step)", m / one);
      const vhat = is("vhat", "new_v / (1 − beta2^step)", v / two);
      return is("", "−learning_rate × (mhat / (√vhat + eps) + weight_decay × params)",
        -c.learning_rate * (mhat / (Math.sqrt(vhat) + c.eps) + c.weight_decay * weight));
    } },
  "muon_update.m": { mark: "m += ", of: (c, i, j) => muonMean(c, i, j, "") },
  "muon_update.move": { mark: "u = orthogonalize…param -= u",
    why: "A matrix stretches some directions of what it reads much, others little. Of the mean "
      + "gradient's matrix, Muon keeps the directions and makes all of these stretches nearly 1, "
      + "so that what is rare is learned, too.",
    of: (c, i, j) => {
      if (parts) muonMean(c, i, j, "new_m");
      const m = c.outs.m.num(i, j), weight = ofWeight(c, c.param, i, j);
      const g = ofWeight(c, c.grad, i, j), [rows, columns] = c.param.shape;
      const ratio = Math.sqrt(Math.max(1, rows / c.blocks / columns));
      is("matrix", "(1 − momentum) × grad_scale × grad + momentum × new_m",
        (1 - c.momentum) * c.grad_scale * g + c.momentum * m);
      const move = c.outs.move, u = !c.m.whole ? direction(c, i, j)
        : -(move.data[move.flat(i, j)] / c.learning_rate + c.weight_decay * weight) / ratio;
      is("u", "“its number once all directions of that matrix are equally long”", u);
      is("ratio", `“√(rows / columns), at least 1${c.blocks > 1 ? `, of each of its ${
        c.blocks} matrices` : ""}”`, ratio);
      return is("", "−learning_rate × (ratio × u + weight_decay × param)",
        -c.learning_rate * (ratio * u + c.weight_decay * weight));
    } },
};
// The moments after an update: AdamW's running means of gradient and square, and Muon's.
function mean(c, i, j, name) {
  const m = c.m.num(i, j), g = ofWeight(c, c.grads, i, j);
  return is(name, "m + (1 − beta1) × (grad_scale × grads − m)",
    m + (1 - c.beta1) * (c.grad_scale * g - m));
}
function square(c, i, j, name) {
  const v = c.v.num(i, j), g = c.grad_scale * ofWeight(c, c.grads, i, j);
  return is(name, "beta2 × v + (1 − beta2) × (grad_scale × grads)²",
    c.beta2 * v + (1 - c.beta2) * g * g);
}
function muonMean(c, i, j, name) {
  const m = c.m.num(i, j), g = ofWeight(c, c.grad, i, j);
  return is(name, "m + (1 − momentum) × (grad_scale × grad − m)",
    m + (1 - c.momentum) * (c.grad_scale * g - m));
}
// A weight's number, or its gradient's: of a large model, moments have some rows and columns.
const ofWeight = (c, tensor, i, j) => !c.m.whole ? tensor.num(i, j)
  : tensor.num(...c.m.inWhole([i, j].slice(0, tensor.shape.length)));
