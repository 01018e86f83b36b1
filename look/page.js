"use strict";
// What one sees. The address says what is shown: #mode/tensor/index.

// ---- pictures -------------------------------------------------------------------------------------------------------

const isDark = () => (document.documentElement.style.colorScheme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function palette() {  // 511 colors, orange for negative to blue for positive: the color-blind tell them apart, too
  const [low, middle, high] = isDark() ? [[255, 150, 60], [32, 34, 40], [110, 185, 255]]
    : [[179, 88, 6], [250, 249, 246], [5, 80, 160]];
  return Array.from({ length: 511 }, (_, i) => middle.map((m, channel) =>
    Math.round(m + ((i < 255 ? low : high)[channel] - m) * Math.abs(i - 255) / 255)));
}
let colors = palette();

function span(numbers) {  // [lowest, highest, the size that has the full color: one number of 200 is larger]
  const finite = Array.from(numbers).filter(isFinite), sizes = [];
  for (let i = 0; i < finite.length; i += Math.ceil(finite.length / 4096)) sizes.push(Math.abs(finite[i]));
  const [low, high] = finite.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  return [low, high, sizes.sort((a, b) => a - b)[Math.floor(sizes.length * .995)] || Math.max(-low, high) || 1];
}

// number(row, column) of rows x columns, in at most height x width pixels: the largest of each pixel's.
function draw(canvas, rows, columns, number, full, width = columns, height = rows) {
  const w = canvas.width = Math.min(columns, width), h = canvas.height = Math.min(rows, height);
  const context = canvas.getContext("2d"), image = context.createImageData(w, h);
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    let most = 0;
    for (let r = Math.floor(y * rows / h); r < Math.floor((y + 1) * rows / h); r++)
      for (let c = Math.floor(x * columns / w); c < Math.floor((x + 1) * columns / w); c++) {
        const value = number(r, c);
        if (isFinite(value) && Math.abs(value) > Math.abs(most)) most = value;
      }
    const color = colors[255 + Math.round(255 * Math.max(-1, Math.min(1, most / full)))];
    image.data.set([...color, 255], 4 * (y * w + x));
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// A tensor on the screen: tokens across, channels down; a weight as it is; one head's attention.
function layout({ shape: s, isWeight }, head = 0) {
  if (s.length === 3) return { rows: s[1], columns: s[2], at: (r, c) => [head, r, c], cell: ([, r, c]) => [r, c] };
  if (s.length === 1) return { rows: 1, columns: s[0], at: (r, c) => [c], cell: ([c]) => [0, c] };
  return isWeight ? { rows: s[0], columns: s[1], at: (r, c) => [r, c], cell: index => index }
    : { rows: s[1], columns: s[0], at: (r, c) => [c, r], cell: ([c, r]) => [r, c] };
}

function moves(key) {  // the optimizer's: the largest of each block of a weight
  const { count, values, rate } = data.update.tensors[key], { shape } = newest[key];
  const numbers = values.map(where => stored(where, count)), at = numbers.slice(0, -3), [moved, m, v] = numbers.slice(-3);
  const columns = shape.length === 1 ? shape[0] : Math.min(shape[1], 32), rows = count / columns;
  return { at, columns, rows, moved, m, v, rate, number: (r, c) => moved[r * columns + c], full: span(moved)[2] };
}

function make(tag, fields = {}, ...children) {
  const { data: own, ...rest } = fields, element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, own);
  element.append(...children);
  return element;
}
const words = (tag, textContent) => make(tag, { textContent });
const cells = (tag, ...all) => make("tr", {}, ...all.map(x => x.tagName === "TD" ? x : make(tag, {}, x)));
const scroll = (...rows) => make("div", { className: "scroll" }, make("table", {}, ...rows));
const link = (tensor, index, text = `${tensor.title}[${index.join(", ")}]${ofLayer(tensor.layer)}`) =>
  make("a", { href: tensor.href(index), textContent: text });

const each = inputs.map(id => [word(id), 1]);  // labels: words, and how many rows or columns each is for
const labels = (list, className, side, size) => make("div", { className }, ...list.map(([textContent, n]) =>
  make("span", { textContent, className: textContent.length > 1 ? "word" : "",
    style: `${side}:${n * size}px;font-size:${Math.min(11, n * size)}px` })));
function labelsOf({ shape, isWeight, name }) {  // across and down
  const Q = newest["atty|0"].shape[1], K = (shape[1] - Q) / 2;
  return isWeight ? [] : [each, shape.length === 3 ? each : name === "qkv" ? [["query", Q], ["key", K], ["value", K]] : []];
}

// Click its cells.
function bigPicture(rows, columns, number, full, [row, column], choose, label, [above = [], left = []], low = -full) {
  const wide = Math.max(200, Math.min(560, innerWidth - 110)) / columns, up = Math.max(.45, Math.min(28, 460 / rows));
  const across = wide > 2 ? Math.min(28, Math.floor(wide)) : wide;
  const canvas = draw(make("canvas", { role: "img", ariaLabel: label }), rows, columns, number, full);
  canvas.style = `width:${columns * across}px;height:${rows * up}px`;
  canvas.onclick = ({ offsetX: x, offsetY: y }) =>
    choose(Math.min(rows - 1, Math.floor(y / up)), Math.min(columns - 1, Math.floor(x / across)));
  const scale = draw(make("canvas", { className: "legend" }), 1, 256, (r, c) => low + (full - low) * c / 255, full);
  const chosen = make("i", { style: `left:${column * across - 2}px;top:${row * up - 2}px;width:${
    Math.max(across, 2) + 4}px;height:${Math.max(up, 2) + 4}px` });
  return make("div", {}, make("div", { className: "big" }, labels(above, "across", "width", across),
    labels(left, "down", "height", up), make("div", {}, canvas, chosen)),
    make("p", {}, `colors: ${say(low)}`, scale, `${say(full)}, and beyond`));
}

function headGrid(number, choose, chosen) {  // all attention maps: a row a layer
  return make("div", {}, ...Array.from({ length: data.L }, (_, l) => make("div", { className: "heads" },
    words("span", `Layer ${l + 1}`), ...Array.from({ length: data.NH }, (_, h) => make("button", { className: "tile",
      onclick: () => choose(l, h), ariaCurrent: chosen === `${l},${h}` },
    draw(make("canvas"), T, T, (r, c) => number(l, h, r, c), 1), `head ${h + 1}`)))));
}

// ---- the page -------------------------------------------------------------------------------------------------------

const WHAT = {  // each tensor of the trainers
  wte: "each token's embedding; the classifier's weight, too, if there is no lm_head", wpe: "each position's embedding",
  lm_head: "the classifier's weight", embedded: "the tokens' embeddings",
  encoded: "the residual stream as it begins: the tokens' embeddings",
  ln1: "the residual stream, normalized: what attention reads", _mean: "the mean of each row of its input",
  _rstd: "1 / the size of each row of its input", qkv: "queries, keys and values of all heads, side by side",
  preatt: "scores: how well a query (row) fits each earlier key (column)",
  att: "attention: the softmax of each row of scores", atty: "what each head gathers: values, weighted by att",
  attproj: "what attention adds to the residual stream", residual2: "the residual stream after attention",
  ln2: "the residual stream, normalized: what the MLP reads", fch: "the MLP's hidden layer",
  fch_gelu: "the hidden layer after GELU", fch_relu2: "the hidden layer after squared ReLU",
  fch_swiglu: "the hidden layer: up × gate × sigmoid(gate)", fcproj: "what the MLP adds to the residual stream",
  residual3: "the residual stream after this layer", lnf: "the residual stream after the last layer, normalized",
  logits: "a number for each token of the vocabulary: the higher, the likelier it is next",
  probs: "the logits' softmax: probabilities", losses: "−log of the probability of the token that came next",
  cos: "cosines of RoPE's angles", sin: "sines of RoPE's angles",
  dlosses: "each position's share of the mean loss: 1 / T",
};
const whatIs = ({ name }) => WHAT[name] ?? WHAT[name.replace(/.*_/, "_")] ?? "a weight";
const WORDS = {
  tensor: "an array of numbers", softmax: "exp of each number, divided by their sum",
  "residual stream": "the numbers that each position carries up through the layers; attention and MLP add to them",
  head: "one of several attentions side by side, each with channels of its own",
  "query, key, value": "what a head makes of each position: a query asks, each key says how well it fits, the values of"
    + " those that fit are added up",
  MLP: "two matmuls with a bend (GELU or SwiGLU) between them, at each position for itself",
  gradient: "how much the loss would change, for a change of 1 in a number", AdamW: "the rule that moves the weights",
};
const ofLayer = l => l === "" ? "" : ` of layer ${l + 1}`;
const go = (mode, key = "", index = []) => { location.hash = `${mode}/${key}/${index.join(",")}`; };
let state = {};  // mode; key, tensor and index, if one is shown; given: the address's index

function read() {  // the address -> state; what is wrong in it is ignored
  const [mode, key, index, number] = decodeURIComponent(location.hash.slice(1)).split("/");
  state = { mode: mode in MODES ? mode : "forward", key, given: (index || "").split(",").filter(Boolean).map(Number) };
  const tensor = state.tensor = tensors[number] ?? (state.mode === "backward" ? gradients : newest)[key];
  if (!tensor) return void (state.key = "");
  const sizes = state.mode === "update" ? [data.update.tensors[key]?.count ?? 0] : tensor.shape;
  const last = tensor.isWeight ? -1 : tensor.shape.length === 3 ? 1 : 0;  // at first, the last position is chosen
  state.index = sizes.map((n, axis) =>
    Math.max(0, Math.min(n - 1, Math.floor(state.given[axis] ?? (axis === last ? n : 0)))) || 0);
}

function tile(key, mode) {
  const tensor = newest[key], shown = mode === "backward" ? gradients[key] : tensor;
  const canvas = make("canvas"), range = words("small", "…");
  const button = make("button", { className: tensor.isWeight ? "tile weight" : "tile", data: { key },
    title: `${whatIs(tensor)}${ofLayer(tensor.layer)}`, onclick: () => {
      go(mode, key);
      if (innerWidth <= 800) $("detail").scrollIntoView();  // there it is above the map
    } },
  canvas, (mode === "backward" ? "d" : "") + tensor.name, words("small", tensor.shape.join(" × ")), range);
  const [NH, R, C] = shown.shape, m = mode === "update" && moves(key), { at, ...own } = layout(shown);
  const [rows, columns] = m ? [m.rows, m.columns] : C ? [R, NH * C] : [own.rows, own.columns];  // C: all heads
  const width = Math.max(48, Math.min(columns, C ? 208 : 104)), height = Math.max(6, Math.min(rows, 56));
  canvas.style = `width:${width}px;height:${height}px`;  // before it is painted, so that nothing moves then
  button.paint = () => {
    const ofHeads = (r, c) => shown.num(Math.floor(c / C), r, c % C), ofOne = (r, c) => shown.num(...at(r, c));
    const number = m ? m.number : C ? ofHeads : ofOne;
    const [low, high, full] = span(m ? m.moved : shown.data);
    draw(canvas, rows, columns, number, full, C && !m ? columns : 104, C && !m ? rows : 56);
    range.textContent = `${say(low)} … ${say(high)}`;
  };
  seen.observe(button);
  return button;
}
const seen = new IntersectionObserver(entries => entries.filter(x => x.isIntersecting).forEach(({ target }) => {
  seen.unobserve(target);
  target.paint();
}), { rootMargin: "300px" });

function drawMap() {  // the calls of the forward pass, a box a layer, the last on top
  const groups = [], mode = state.mode;
  for (const c of calls.slice(0, data.forward)) {
    const outs = Object.values(c.outs), { layer } = outs[0];
    if (groups.at(-1)?.layer !== layer) groups.push({ layer, boxes: [] });
    const shown = [...outs, ...Object.values(c.ins).filter(x => x.isWeight)].filter(x =>
      mode === "backward" ? gradients[x.key] : mode === "forward" || x.isWeight);
    if (!shown.length) continue;
    groups.at(-1).boxes.push(make("div", { className: "call" }, words("span", c.f.replace("_forward", "")),
      make("div", { className: "tiles" }, ...shown.map(x => tile(x.key, mode)))));
  }
  $("map").className = mode;
  $("map").replaceChildren(...groups.reverse().map(({ layer, boxes }, i) => make("div", { className: "group" },
    words("h3", layer === "" ? (i ? "Embedding" : "Prediction") : `Layer ${layer + 1} (l = ${layer})`),
    make("div", { className: "calls" }, ...boxes))));
}

function termsOf({ rows }) {  // a sum's, the largest first
  const sorted = rows.toSorted((a, b) => Math.abs(b.product) - Math.abs(a.product)), rest = sorted.slice(12);
  const several = rows[0].values.length > 1, sum = say(rest.reduce((total, row) => total + row.product, 0));
  return scroll(...sorted.slice(0, 12).map(row => cells("td", row.label,
    ...row.values.flatMap((x, i) => [...(i ? ["×"] : []), link(x.tensor, x.index, say(x.value))]),
    ...(several ? [`= ${say(row.product)}`] : []))),
  ...(rest.length ? [cells("td", `${rest.length} smaller`, ...(several ? ["", "", "", `= ${sum}`] : [sum]))] : []));
}

function howMade(e) {
  return [make("div", { className: "made" }, words("h3", "How it is made"), ...e.parts.flatMap(part => [
    make("p", {}, part.tensor ? link(part.tensor, part.index) : part.words,
      ...("value" in part ? [part.rows ? ": the sum is " : " = ", words("b", say(part.value))] : [])),
    ...(part.rows?.length ? [termsOf(part)] : [])]),
  make("p", {}, "Result ", make("output", { id: "value", textContent: say(e.value) }))), ...source(e)];
}

function source({ f, mark }) {  // of a layer's function; the line that computes the number is marked
  const { text, line, file } = data.source[f], lines = text.trimEnd().split("\n").map(code => `${code}\n`);
  const marked = lines.findIndex(code => mark.split("|").some(x => code.includes(x)));
  return [words("h3", `${f}, ${file}:${line}`),
    make("pre", { tabIndex: 0 }, ...lines.map((code, i) => i === marked ? words("mark", code) : code))];
}

function drawDetail() {
  const { mode, key, index, tensor } = state;
  if (!key) return mode === "update" ? mostMoved() : introduction();
  if (mode === "update") return tensor.isWeight ? drawMove() : mostMoved();
  const [low, high, full] = span(tensor.data), what = whatIs(tensor);
  const { rows, columns, at, cell } = layout(tensor, index[0]), e = explain(tensor, index);
  const readers = calls.filter(c => Object.values(c.ins).includes(tensor)).flatMap(c => Object.values(c.outs));
  return [words("h2", tensor.title + ofLayer(tensor.layer)),
    words("p", tensor.kind === "gradient" ? `How the loss changes with ${tensor.name}: ${what}.` : `It is ${what}.`),
    words("p", `${tensor.shape.join(" × ")} numbers, ${say(low)} … ${say(high)}`),
    bigPicture(rows, columns, (r, c) => tensor.num(...at(r, c)), full, cell(index),
      (r, c) => go(mode, key, at(r, c)), `${tensor.title}: ${what}`, labelsOf(tensor), low < 0 ? -full : 0),
    make("p", { className: "index" }, ...index.map((i, axis) => make("label", {}, `${tensor.axes[axis]} `,
      make("input", { type: "number", value: i, min: 0, max: tensor.shape[axis] - 1,
        onchange: event => go(mode, key, index.with(axis, +event.target.value)) })))),
    make("p", {}, `${tensor.title}[${index.join(", ")}], ${
      index.map((i, axis) => tensor.inWords(axis, i)).join(", ")}: `, words("output", say(tensor.num(...index)))),
    ...(e ? howMade(e) : [words("p", tensor.isWeight
      ? "Training made this weight. Backward has its gradient, Update how it moves." : "It is given.")]),
    make("p", {}, readers.length ? "It goes into " : "", ...readers.flatMap((x, i) =>
      [i ? ", " : "", link(x, x.shape.map(() => 0), x.title + ofLayer(x.layer))]))];
}

function drawMove() {
  const { key, index: [k] } = state, { at, rows, columns, number, full, moved } = moves(key), e = explainMove(key, k);
  const weight = newest[key];
  return [words("h2", `${data.update.optimizer} moves ${weight.name}${ofLayer(weight.layer)}`),
    words("p", `Of ${weight.shape.join(" × ")} weights, the one in each block that moves most.`),
    bigPicture(rows, columns, number, full, [Math.floor(k / columns), k % columns],
      (r, c) => go("update", key, [r * columns + c]), "how far the weights move", []),
    make("p", {}, `Weight [${at.map(x => x[k]).join(", ")}] moves by `, words("output", say(moved[k]))),
    ...howMade(e)];
}

function mostMoved() {
  const most = Object.keys(data.update.tensors).map(key => {
    const { moved } = moves(key), k = moved.reduce((best, x, i) => Math.abs(x) > Math.abs(moved[best]) ? i : best, 0);
    return { key, k, move: moved[k] };
  }).sort((a, b) => Math.abs(b.move) - Math.abs(a.move)).slice(0, 10);
  return [words("h2", `Update: how far ${data.update.optimizer} moves each weight`),
    words("p", `If the model were trained on this prompt next: step ${data.update.step}, learning rate ${
      data.update.learning_rate}.`),
    words("h3", "The weights that move most"), scroll(...most.map(({ key, k, move }) => cells("td",
      make("a", { href: `#update/${key}/${k}`, textContent: newest[key].name + ofLayer(newest[key].layer) }),
      say(move)))),
    words("h3", "The tokens whose embeddings move most"),
    scroll(...data.update.embeddings.map(([id, length]) => cells("td", `“${word(id)}”`, say(length))))];
}

function introduction() {
  return [words("h2", state.mode === "backward" ? "Backward: how the loss changes with each number"
    : "Forward: from tokens to a loss"),
  words("p", "Each tile is a tensor: tokens across, channels down; dashed: a weight. The step goes up, from the"
    + " embedding at the bottom to the loss on top. Click a tile, then one of its numbers, to see how it is made, and"
    + " the line of the trainer that makes it. Arrow keys move, Escape goes up. In the prompt, blue was expected."),
  make("details", {}, words("summary", "Words"), make("dl", {}, ...Object.entries(WORDS).flatMap(([word, meaning]) =>
    [words("dt", word), words("dd", meaning)]))),
  words("p", `The loss is ${say(data.loss)}, the mean over the positions:`),
  scroll(cells("th", "after", "came", "probability", "loss", "best guess"), ...inputs.map((_, t) => {
    const [id, p] = data.guesses.at(-1)[t][0], losses = newest["losses|"];
    return cells("td", position(t), `“${word(targets[t])}”`, say(newest["probs|"].num(t, targets[t])),
      link(losses, [t], say(losses.num(t))), `“${word(id)}” ${say(p)}`);
  }))];
}

function drawAttention() {
  const [l, h, t] = state.key ? [state.tensor.layer, ...state.index] : [0, 0, T - 1], att = newest[`att|${l}`];
  const looks = inputs.map((_, x) => [x, att.num(h, t, x)]).sort((a, b) => b[1] - a[1]).slice(0, 8);
  state.position = t;
  const choose = (l, h) => {
    go("attention", `att|${l}`, [h, t, 0]);
    if (innerWidth <= 800) $("one").scrollIntoView();
  };
  return [make("div", {}, words("h2", "Where each head looks"),
    words("p", "A row is a position, the first on top; its columns are the positions up to it. Full color: 1."),
    headGrid((l, h, r, c) => newest[`att|${l}`].num(h, r, c), choose, `${l},${h}`)),
  make("div", { id: "one" }, words("h2", `Layer ${l + 1}, head ${h + 1}`),
    bigPicture(T, T, (r, c) => att.num(h, r, c), 1, [t, looks[0][0]], r => go("attention", `att|${l}`, [h, r, 0]),
      `attention of layer ${l + 1}, head ${h + 1}`, labelsOf(att), 0),
    words("p", `From position ${position(t)} it looks at (the prompt above chooses another position):`),
    scroll(...looks.map(([x, p]) => cells("td", position(x), link(att, [h, t, x], say(p))))))];
}

const shade = (p, most, paper) => `background:color-mix(in srgb, var(--accent) ${Math.round(most * p)}%, ${paper})`;
const guess = ([id, p], target) => make("td", { className: id === target ? "guess right" : "guess",
  textContent: `${word(id)} ${Math.round(100 * p)}%`, style: shade(p, 50, "transparent") });

function drawGuesses() {
  const t = state.position = Math.max(0, Math.min(T - 1, state.given[0] || 0));
  const depends = stored(data.depends, T * T).subarray(t * T, t * T + t + 1);
  return [make("div", {}, words("h2", "The best guess after each layer"),
    words("p", "The residual stream after each layer, read as if it were the last. Underlined: the token that came."),
    scroll(cells("th", "after", ...data.guesses.map((_, l) => l ? `layer ${l}` : "embedding"), "came"),
      ...inputs.map((_, t) => cells("td", make("a", { href: `#guesses//${t}`, textContent: position(t) }),
        ...data.guesses.map(layer => guess(layer[t][0], targets[t])), `“${word(targets[t])}”`)))),
  make("div", {}, words("h2", `After ${position(t)} came “${word(targets[t])}”`),
    words("p", `Loss ${say(newest["losses|"].num(t))}. The five best guesses:`),
    scroll(...data.guesses.at(-1)[t].map(([id, p]) => cells("td", `“${word(id)}”`, say(p)))),
    words("p", "How much that loss depends on each token: the gradient with respect to its embedding, times the"
      + " embedding. Positive: more of it would raise the loss."),
    scroll(...Array.from(depends, (x, i) => [i, x]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 10)
      .map(([i, x]) => cells("td", position(i), say(x)))))];
}

function drawTraining() {
  const frames = data.film, n = Math.max(0, Math.min(frames.length - 1, state.given[0] ?? frames.length - 1));
  if (!frames.length) return [make("div", {}, words("h2", "Training, as a film"), words("p",
    "It needs a run with several checkpoints: train with -n 100 -o runs/mine, then look at runs/mine."))];
  const frame = frames[n], att = stored(frame.att, data.L * data.NH * T * T, T);
  const slider = make("input", { type: "range", id: "frame", min: 0, max: frames.length - 1, value: n,
    ariaLabel: "checkpoint" });
  slider.oninput = () => { history.replaceState(0, "", `#training//${slider.value}`); show(); $("frame").focus(); };
  return [make("div", {}, words("h2", `The prompt at step ${frame.step}: loss ${say(frame.loss)}`), slider,
    scroll(cells("th", "step", ...frames.map(f => `${f.step}`)), cells("td", "loss", ...frames.map(f => say(f.loss)))),
    words("p", "It is the loss of this prompt alone, which may rise while that of the training text falls."),
    words("h3", "Size (root mean square) of the residual stream"),
    scroll(...frame.norms.map((x, l) => cells("td", l ? `after layer ${l}` : "embedding", say(x)))),
    headGrid((l, h, r, c) => att[((l * data.NH + h) * T + r) * T + c], () => {})),
  make("div", {}, scroll(cells("th", "after", "came", "loss", "guesses"), ...inputs.map((_, t) => cells("td",
    position(t), `“${word(targets[t])}”`, say(frame.losses[t]),
    ...frame.guesses[t].map(x => guess(x, targets[t]))))))];
}

function drawPrompt() {  // the likelier a token's successor was, the bluer
  const { mode, key, index, tensor } = state, losses = newest["losses|"];
  const choose = t => mode === "attention" ? go(mode, key || "att|0", key ? [index[0], t, 0] : [0, t, 0])
    : key && mode !== "update" && !tensor.isWeight ? go(mode, key, index.with(index.length === 3 ? 1 : 0, t))
      : go("guesses", "", [t]);
  $("prompt").replaceChildren(...inputs.map((id, t) => make("li", {}, make("button", {
    textContent: word(id), title: `position ${t}; then “${word(targets[t])}” came, loss ${say(losses.num(t))}`,
    ariaCurrent: t === state.position, onclick: () => choose(t),
    style: shade(Math.exp(-losses.num(t)), 60, "var(--card)") }))));
}

const MODES = { forward: drawDetail, backward: drawDetail, update: drawDetail, attention: drawAttention,
  guesses: drawGuesses, training: drawTraining };

function show() {
  read();
  const hasMap = MODES[state.mode] === drawDetail;
  document.querySelector("main").className = hasMap ? "" : "one";
  $("map").hidden = !hasMap;
  $("detail").replaceChildren(...MODES[state.mode]());
  if (hasMap && $("map").className !== state.mode) drawMap();
  for (const x of document.querySelectorAll("#map .tile")) x.ariaCurrent = x.dataset.key === state.key;
  for (const x of $("modes").children) x.ariaPressed = x.dataset.mode === state.mode;
  drawPrompt();
}

function find({ target }) {  // "qkv 2", "dqkv of layer 2": a name and a layer, from 1; without one, the first
  const [, name = "", l] = /(\w+)\D*(\d*)$/.exec(target.value.trim().replace(/ +of layer +/, " ")) ?? [];
  const keys = [name, name.slice(1)].flatMap(x => [`${x}|${l ? l - 1 : ""}`, `${x}|0`]);
  const key = keys.find(x => newest[x]);
  target.setCustomValidity(key ? "" : "no such tensor");
  if (target.reportValidity()) go(keys.indexOf(key) > 1 || state.mode === "backward" ? "backward" : "forward", key);
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function press(event) {
  const { mode, key, index, tensor } = state, arrow = ARROWS[event.key];
  if (event.target.tagName === "INPUT") return;
  if (event.key === "/") $("find").focus();
  else if (event.key === "Escape") go(mode);
  else if (arrow && key && mode !== "update") {
    const { rows, columns, at, cell } = layout(tensor, index[0]), [r, c] = cell(index);
    go(mode, key, at(Math.max(0, Math.min(rows - 1, r + arrow[0])), Math.max(0, Math.min(columns - 1, c + arrow[1]))));
  } else return;
  event.preventDefault();
}

function changeTheme() {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  colors = palette();
  $("map").className = "";  // draw it anew
  show();
}

$("summary").textContent = `${data.path}: ${data.title}, ${data.model}. ${T} tokens, loss ${say(data.loss)}`;
$("modes").append(...Object.keys(MODES).map(mode =>
  make("button", { textContent: mode, data: { mode }, onclick: () => go(mode) })));
$("names").append(...Object.values(newest).map(x =>
  make("option", { value: x.layer === "" ? x.name : `${x.name} ${x.layer + 1}` })));
$("find").onchange = find;
$("theme").onclick = changeTheme;
addEventListener("hashchange", show);
addEventListener("keydown", press);
unpack().then(show);
