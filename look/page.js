// What one sees. The address says what is shown: #mode/tensor/index.

// ---- elements -------------------------------------------------------------------------------------------------------

function make(tag, fields, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children.flat(Infinity));
  return element;
}
const words = (tag, textContent) => make(tag, { textContent });
const titled = (title, ...children) => make("div", {}, words("h2", title), ...children);
const cells = (tag, all) => make("tr", {}, all.map(x => x.tagName === "TD" ? x : make(tag, {}, x)));
const table = (rows, heads = []) =>
  make("div", { className: "scroll" }, make("table", {}, cells("th", heads), rows.map(row => cells("td", row))));
const link = (tensor, index, text = tensor.label(index) + ofLayer(tensor.layer)) =>
  make("a", { href: tensor.href(index), textContent: text });
const linked = ({ tensor, index, value }) => tensor ? link(tensor, index, say(value)) : say(value);
const largest = (all, count, number) =>  // its numbers are the largest, positive or negative
  all.toSorted((a, b) => Math.abs(number(b)) - Math.abs(number(a))).slice(0, count);
const clamp = (x, most) => Math.max(0, Math.min(most, Math.floor(x) || 0));

// ---- pictures: { rows, columns, number(row, column) } ---------------------------------------------------------------

const ORANGE = [230, 116, 20], BLUE = [40, 125, 225];  // negative, positive: the color-blind tell them apart, too

// A pixel has the largest of its numbers, and is as opaque; `full` or more: opaque.
function draw({ rows, columns, number }, full, canvas = make("canvas"), width = columns, height = rows) {
  const w = canvas.width = Math.min(columns, width), h = canvas.height = Math.min(rows, height);
  const context = canvas.getContext("2d"), image = context.createImageData(w, h);
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    let most = 0;
    for (let r = Math.floor(y * rows / h); r < Math.floor((y + 1) * rows / h); r++)
      for (let c = Math.floor(x * columns / w); c < Math.floor((x + 1) * columns / w); c++) {
        const value = number(r, c);
        if (isFinite(value) && Math.abs(value) > Math.abs(most)) most = value;
      }
    image.data.set([...(most < 0 ? ORANGE : BLUE), 255 * Math.abs(most) / full], 4 * (y * w + x));
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// Of a tensor: tokens across, channels down; a weight as it is; one head's attention, or all side by side.
function pictureOf(tensor, head) {  // at(row, column) is the index of a number, cell(index) where it is
  const [I, J = 1, K] = tensor.shape;
  const [rows, columns, at, cell] =
    K && head === undefined ? [J, I * K, (r, c) => [Math.floor(c / K), r, c % K]]
      : K ? [J, K, (r, c) => [head, r, c], ([, r, c]) => [r, c]]
        : tensor.isWeight && J > 1 ? [I, J, (r, c) => [r, c], index => index]
          : [J, I, (r, c) => [c, r], ([c, r = 0]) => [r, c]];
  return { rows, columns, at, cell, number: (r, c) => tensor.num(...at(r, c)) };
}

const tokens = inputs.map(id => [word(id), 1]);  // labels: words, and how many rows or columns each is for
const labels = (all, className, side, size) => make("div", { className }, all.map(([textContent, n]) =>
  make("span", { textContent, className: textContent.length > 1 ? "word" : "",
    style: `${side}:${n * size}px;font-size:${Math.min(11, n * size)}px` })));
function bandsOf({ name, shape }) {  // of a tensor's channels: down
  const Q = newest["atty|0"].shape[1], K = (shape[1] - Q) / 2;
  return name === "qkv" ? [["query", Q], ["key", K], ["value", K]] : shape.length === 3 ? tokens : [];
}

function bigPicture(ariaLabel) {  // of the tensor that is shown; click its cells
  const { mode, key, index, tensor, picture } = state, { rows, columns } = picture, { full } = tensor.limits;
  const across = Math.min(28, Math.max(200, Math.min(560, innerWidth - 110)) / columns);
  const up = Math.max(.45, Math.min(28, 460 / rows)), [row, column] = picture.cell(index);
  const canvas = draw(picture, full, make("canvas", { role: "img", ariaLabel,
    style: `width:${columns * across}px;height:${rows * up}px`, onclick: ({ offsetX, offsetY }) =>
      go(mode, key, picture.at(clamp(offsetY / up, rows - 1), clamp(offsetX / across, columns - 1))) }));
  const chosen = make("i", { style: `left:${column * across}px;top:${row * up}px;width:${across}px;height:${up}px` });
  return [make("div", { className: "big" }, labels(tensor.isWeight ? [] : tokens, "across", "width", across),
    labels(bandsOf(tensor), "down", "height", up), make("div", {}, canvas, chosen)),
  make("p", {}, `colors: ${say(-full)}`, make("span", { className: "legend" }), `${say(full)}, and beyond`)];
}

const headGrid = (number, chosen) =>  // all attention maps: a row a layer
  make("div", {}, list(data.L, l => make("div", { className: "heads" }, words("span", `Layer ${l + 1}`),
    list(data.NH, h => make("a", { href: at("attention", `att|${l}`, [h]), ariaCurrent: chosen === `${l},${h}` },
      draw({ rows: T, columns: T, number: (r, c) => number(l, h, r, c) }, 1), `head ${h + 1}`)))));

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
  cos: "cosines of RoPE's angles", sin: "sines of RoPE's angles", dlosses: "its share of the mean loss: 1 / T",
};
const whatIs = ({ name }) => WHAT[name] ?? WHAT[name.replace(/.*_/, "_")] ?? "a weight";
const ofLayer = l => l === "" ? "" : ` of layer ${l + 1}`;
const at = (mode, key = "", index = []) => `#${mode}/${key}/${index.join(",")}`;
const go = (...where) => { location.hash = at(...where); };
let state = {};  // mode; key, tensor, picture and index, if one is shown; given: the address's index; view: key or head

function read() {  // the address -> state; what is wrong in it is ignored
  const [mode, chosen, index = "", number] = decodeURIComponent(location.hash.slice(1)).split("/");
  const all = shownIn[mode] ?? newest, given = index.split(",").filter(Boolean).map(Number);
  const key = tensors[number] || all[chosen] ? chosen : mode === "attention" ? "att|0" : "";
  const tensor = tensors[number] ?? all[key];
  state = { mode: mode in MODES ? mode : "forward", key, given, tensor };
  if (!tensor) return;
  const last = tensor.isWeight ? -1 : tensor.shape.length === 3 ? 1 : 0;  // at first, the last position is chosen
  state.index = tensor.shape.map((n, axis) => clamp(state.given[axis] ?? (axis === last ? n : 0), n - 1));
  state.picture = pictureOf(tensor, state.index[0]);
  state.view = chosen && `${key},${mode === "attention" ? state.index[0] : ""}`;
}

function tile(key, mode) {
  const tensor = newest[key], shown = shownIn[mode][key], picture = pictureOf(shown);
  const canvas = make("canvas"), range = words("small", "…"), most = shown.shape.length === 3 ? 208 : 104;
  canvas.style = `width:clamp(48px,${picture.columns}px,${most}px);height:clamp(6px,${picture.rows}px,56px)`;
  const className = tensor.isWeight ? "weight" : "", title = whatIs(tensor) + ofLayer(tensor.layer);
  const link = make("a", { href: at(mode, key), className, title }, canvas, PREFIX[mode] + tensor.name,
    words("small", tensor.shape.join(" × ")), range);
  const seen = new IntersectionObserver(found => found.at(-1).isIntersecting && setTimeout(() => {
    seen.disconnect();  // painted when it is first seen; its size stands before, so that nothing moves then
    draw(picture, shown.limits.full, canvas, most, 56);
    range.textContent = `${say(shown.limits.low)} … ${say(shown.limits.high)}`;
  }), { rootMargin: "300px" });
  seen.observe(link);
  return link;
}

const layerOf = c => Object.values(c.outs)[0].layer;
function drawMap(mode) {  // the calls of the forward pass, a box a layer, the last on top
  const forward = calls.slice(0, data.forward), first = forward.findIndex(c => layerOf(c) === 0);
  const groups = Map.groupBy(forward, (c, i) =>
    layerOf(c) !== "" ? `Layer ${layerOf(c) + 1} (l = ${layerOf(c)})` : i < first ? "Embedding" : "Prediction");
  const boxes = ({ f, ins, outs }) => {
    const shown = [...Object.values(outs), ...Object.values(ins).filter(x => x.isWeight)].map(x => x.key)
      .filter(key => shownIn[mode][key]);
    return shown.length ? make("div", { className: "call" }, words("span", f.replace("_forward", "")),
      make("div", { className: "tiles" }, shown.map(key => tile(key, mode)))) : [];
  };
  $("map").className = mode;
  $("map").replaceChildren(...[...groups].reverse().map(([title, made]) => make("div", { className: "group" },
    words("h3", title), make("div", { className: "calls" }, made.map(boxes)))));
}

function termsOf(rows) {  // a sum's, the largest first, each with the words for what changes from one to the next
  const shown = largest(rows, 12, row => row.value), rest = rows.filter(row => !shown.includes(row));
  const changes = (_, axis) => rows.length === 1 || new Set(rows.map(row => row.parts[0].index[axis])).size > 1;
  return table([...shown.map(({ parts: [first, ...others], value }) => [
    first.tensor.inWords(first.index).filter(changes).join(", "), linked(first),
    ...others.flatMap(part => ["×", linked(part)]), value === first.value ? "" : `= ${say(value)}`]),
  ...(rest.length ? [[`${rest.length} smaller`, ...rows[0].parts.flatMap(() => ["", ""]).slice(1),
    `= ${say(rest.reduce((sum, row) => sum + row.value, 0))}`]] : [])]);
}

function howMade(tensor, index) {  // and its function's source; the line that computes the number is marked
  const c = calls[tensor.by], [mark, formula] = tensor.formula, made = [], { text, line, file } = data.source[c.f];
  const value = noting(made, () => formula(c, ...index)), marks = (mark.call ? mark(c, ...index) : mark).split("|");
  const lines = text.trimEnd().split("\n").map(code => `${code}\n`);
  const marked = lines.findIndex(code => marks.some(x => code.includes(x)));
  return [make("div", { className: "made" }, words("h3", "How it is made"), made.map(({ rows, ...part }) => [
    make("p", {}, part.tensor ? link(part.tensor, part.index) : part.words, rows ? ": the sum is " : " = ",
      words("b", say(part.value))), rows ? termsOf(rows) : []]),
  make("p", {}, "Result ", make("output", { id: "value", textContent: say(value) }))),
  words("h3", `${c.f}, ${file}:${line}`),
  make("pre", { tabIndex: 0 }, lines.map((code, i) => i === marked ? words("mark", code) : code))];
}

function drawDetail() {
  const { mode, key, index, tensor } = state;
  if (!key) return mode === "update" ? mostMoved() : introduction();
  const what = whatIs(tensor), { low, high } = tensor.limits, row = list(tensor.shape.at(-1), i => index.with(-1, i));
  return [words("h2", tensor.title + ofLayer(tensor.layer)),
    words("p", { backward: `How the loss changes with ${tensor.name}: ${what}.`, forward: `It is ${what}.`,
      update: `How far ${data.update.optimizer} moves ${tensor.name}: the rows and columns with the largest moves.`,
    }[tensor.mode]),
    words("p", `${(newest[key] ?? tensor).shape.join(" × ")} numbers, ${say(low)} … ${say(high)}`),
    bigPicture(`${tensor.title}: ${what}`),
    tensor.whole ? [] : make("p", { className: "index" }, index.map((value, axis) => make("label", {},
      `${tensor.axes[axis]} `, make("input", { type: "number", value, min: 0, max: tensor.shape[axis] - 1,
        onchange: event => go(mode, key, index.with(axis, +event.target.value)) })))),
    make("p", {}, [tensor.label(index), ...tensor.inWords(index)].join(", "), ": ",
      words("output", say(tensor.num(...index)))),
    make("details", { open: mode === "attention" }, words("summary", "The largest of its row"), table(largest(row, 8,
      i => tensor.num(...i)).map(i => [tensor.inWords(i).at(-1), link(tensor, i, say(tensor.num(...i)))]))),
    tensor.by === null ? words("p", tensor.isWeight ? "Training made this weight." : "It is given.")
      : howMade(tensor, index)];
}

function mostMoved() {
  const { optimizer, step, learning_rate: rate, embeddings } = data.update;
  const most = Object.values(moves).map(tensor => {
    const { low, high } = tensor.limits, move = -low > high ? low : high;
    return [link(tensor, tensor.indexOf(tensor.data.indexOf(move))), move];
  });
  return [words("h2", `Update: how far ${optimizer} moves each weight`),
    words("p", `If the model were trained on this prompt next: step ${step}, learning rate ${rate}. Of each`
      + " matrix, a tile has the rows and columns with the largest moves. Click a number to see how it is made."),
    words("h3", "The weights that move most, one of each tensor"),
    table(largest(most, 12, ([, move]) => move).map(([a, move]) => [a, say(move)])),
    words("h3", "The tokens whose embeddings move most"),
    table(embeddings.map(([id, length]) => [`“${word(id)}”`, say(length)]))];
}

function introduction() {
  return [words("h2", state.mode === "backward" ? "Backward: how the loss changes with each number"
    : "Forward: from tokens to a loss"),
  words("p", "Each tile is a tensor: tokens across, channels down; dashed: a weight. The step goes up, from the"
    + " embedding at the bottom to the loss on top. Click a tile, then one of its numbers, to see how it is made, and"
    + " the line of the trainer that makes it. Arrow keys move, Escape goes up, / finds a tensor. In the prompt,"
    + " blue was expected."),
  words("p", `The loss is ${say(data.loss)}, the mean over the positions. Of each: what came, with its probability,`
    + " the loss, and the likeliest tokens."),
  outcomes(data.losses, data.guesses.at(-1), (loss, t) => link(newest["losses|"], [t], say(loss)))];
}

function drawAttention() {
  const { tensor, index: [head, t] } = state;
  state.position = t;
  return [titled("Where each head looks",
    words("p", "A row is a position, the first on top; its columns are the positions up to it. Full color: 1."),
    headGrid((l, h, r, c) => newest[`att|${l}`].num(h, r, c), `${tensor.layer},${head}`)),
  make("div", { id: "head" }, drawDetail())];
}

const shade = (p, most, paper) => `background:color-mix(in srgb, var(--accent) ${Math.round(most * p)}%, ${paper})`;
const guess = ([id, p], target) => make("td", { className: id === target ? "guess right" : "guess",
  textContent: `${word(id)} ${Math.round(100 * p)}%`, style: shade(p, 50, "transparent") });
const outcomes = (losses, guesses, cell = say) => table(losses.map((loss, t) =>  // came: with its probability
  [position(t), `“${word(targets[t])}” ${say(Math.exp(-loss))}`, cell(loss, t),
    ...guesses[t].slice(0, 3).map(x => guess(x, targets[t]))]), ["after", "came", "loss", "guesses"]);

function drawGuesses() {
  const t = state.position = clamp(state.given[0], T - 1), depends = stored(data.depends + t * T, t + 1);
  return [titled("The best guess after each layer",
    words("p", "The residual stream after each layer, read as if it were the last. Underlined: the token that came."),
    table(inputs.map((_, t) => [make("a", { href: `#guesses//${t}`, textContent: position(t) }),
      ...data.guesses.map(layer => guess(layer[t][0], targets[t])), `“${word(targets[t])}”`]),
    ["after", ...data.guesses.map((_, l) => l ? `layer ${l}` : "embedding"), "came"])),
  titled(`After ${position(t)} came “${word(targets[t])}”`,
    words("p", `Loss ${say(data.losses[t])}. The five best guesses:`),
    table(data.guesses.at(-1)[t].map(([id, p]) => [`“${word(id)}”`, link(newest["probs|"], [t, id], say(p))])),
    words("p", "How much that loss depends on each token: the gradient with respect to its embedding, times the"
      + " embedding. Positive: more of it would raise the loss."),
    table(largest(Array.from(depends, (x, i) => [i, x]), 10, ([, x]) => x).map(([i, x]) => [position(i), say(x)])))];
}

function drawTraining() {
  const frames = data.film, n = clamp(state.given[0] ?? frames.length - 1, frames.length - 1), frame = frames[n];
  if (!frame) return [titled("Training, as a film", words("p",
    "It needs a run with several checkpoints: train with -n 100 -o runs/mine, then look at runs/mine."))];
  const att = stored(frame.att, data.L * data.NH * T * T);
  const slider = make("input", { type: "range", id: "frame", min: 0, max: frames.length - 1, value: n,
    ariaLabel: "checkpoint", oninput: ({ target }) => location.replace(`#training//${target.value}`) });
  return [titled(`The prompt at step ${frame.step}: loss ${say(frame.loss)}`, slider,
    table([["loss", ...frames.map(f => say(f.loss))], ...frame.norms.map((_, l) =>
      [l ? `after layer ${l}` : "embedding", ...frames.map(f => say(f.norms[l]))])],
    ["step", ...frames.map(f => `${f.step}`)]),
    words("p", "It is the loss of this prompt alone, which may rise while that of the training text falls. Below it:"
      + " the size of the residual stream, its root mean square."),
    headGrid((l, h, r, c) => att[((l * data.NH + h) * T + r) * T + c])),
  outcomes(frame.losses, frame.guesses)];
}

function drawPrompt() {  // the likelier a token's successor was, the bluer
  const { mode, key, index: [head] = [0] } = state;
  const where = t => mode === "attention" ? [mode, key, [head, t, 0]] : ["guesses", "", [t]];
  $("prompt").replaceChildren(...inputs.map((id, t) => make("li", {}, make("a", { href: at(...where(t)),
    textContent: word(id), title: `position ${t}; then “${word(targets[t])}” came, loss ${say(data.losses[t])}`,
    ariaCurrent: t === state.position, style: shade(Math.exp(-data.losses[t]), 60, "var(--card)") }))));
}

const MODES = { forward: drawDetail, backward: drawDetail, update: drawDetail, attention: drawAttention,
  guesses: drawGuesses, training: drawTraining };

function show() {
  const before = state.view, { id } = document.activeElement;
  read();
  const hasMap = MODES[state.mode] === drawDetail;
  document.querySelector("main").className = hasMap ? "" : "one";
  $("map").hidden = !hasMap;
  $("detail").replaceChildren(...MODES[state.mode]().flat(Infinity));
  $(id)?.focus();  // the slider is a new one
  if (hasMap && $("map").className !== state.mode) drawMap(state.mode);
  for (const a of document.querySelectorAll("nav a, .tiles a"))
    a.ariaCurrent = [`#${state.mode}`, at(state.mode, state.key)].includes(a.hash);
  drawPrompt();
  if (innerWidth <= 800 && state.view && state.view !== before) ($("head") ?? $("detail")).scrollIntoView();
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
addEventListener("keydown", event => {
  const { mode, key, index, picture } = state, arrow = ARROWS[event.key];
  if (event.target.matches("input:not(#theme)")) return;
  if (event.key === "/") $("find").focus();
  else if (event.key === "Escape") go(mode);
  else if (arrow && key) {
    const [r, c] = picture.cell(index).map((i, axis) => i + arrow[axis]);
    if (r >= 0 && c >= 0 && r < picture.rows && c < picture.columns) go(mode, key, picture.at(r, c));
  } else return;
  event.preventDefault();
});

for (const mode in shownIn) for (const key in shownIn[mode]) {
  const [name, l] = key.split("|"), value = PREFIX[mode] + name + (l && ` ${+l + 1}`);  // "qkv 2", "dqkv 2"
  $("names").append(make("option", { value, where: [mode, key] }));
}
$("find").onchange = ({ target }) => {
  const text = target.value.trim(), names = [text, `${text} 1`];
  const found = Array.from($("names").options).find(({ value }) => names.includes(value));
  target.setCustomValidity(found ? "" : "no such tensor");
  if (!target.reportValidity()) return;
  target.value = "";
  target.blur();
  go(...found.where);
};

$("summary").textContent = `${data.path}: ${data.title}, ${data.model}. ${T} tokens, loss ${say(data.loss)}`;
addEventListener("hashchange", show);
unpack().then(show, () =>
  $("detail").append("Its bytes were changed: open it from the disk, or serve it without a charset."));
