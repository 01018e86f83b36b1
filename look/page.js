// What one sees. The address says what is shown: #mode/tensor/index/number.

// ---- elements -----------------------------------------------------------------------------------

function make(tag, fields, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children.flat(Infinity));
  return element;
}
const words = (tag, textContent, className = "") => make(tag, { textContent, className });
const titled = (title, ...children) => make("div", {}, words("h2", title), ...children);
const cells = (tag, all) => make("tr", {}, all.map(x => x.tagName === "TD" ? x : make(tag, {}, x)));
const table = (rows, heads = []) => make("div", { className: "scroll", tabIndex: 0 },
  make("table", {}, cells("th", heads), rows.map(row => cells("td", row))));
const link = (tensor, index, text = tensor.label(index) + ofLayer(tensor.layer)) =>
  make("a", { href: tensor.href(index), textContent: text });
const button = (textContent, onclick, id = "") =>
  make("button", { type: "button", textContent, onclick, id });
const largest = (all, count, number) =>  // its numbers are the largest, positive or negative
  all.toSorted((a, b) => Math.abs(number(b)) - Math.abs(number(a))).slice(0, count);
const linked = ({ tensor, index, value }) => tensor ? link(tensor, index, say(value)) : say(value);
const clamp = (x, most) => Math.max(0, Math.min(most, Math.floor(x) || 0));
const percent = p => p < .001 ? "less than 0.1%"
  : `${p < .01 ? (100 * p).toFixed(1) : Math.round(100 * p)}%`;

// ---- pictures: { rows, columns, number(row, column) } -------------------------------------------

const ORANGE = 0x1474e6, BLUE = 0xe17d28;  // negative, positive: the color-blind tell them apart

// A pixel has the largest of its numbers, and is as opaque; `full` or more: opaque.
function draw({ rows, columns, number }, full, canvas = make("canvas"), width = columns,
  height = rows) {
  const w = canvas.width = Math.min(columns, width), h = canvas.height = Math.min(rows, height);
  const context = canvas.getContext("2d"), image = context.createImageData(w, h);
  const pixels = new Uint32Array(image.data.buffer);
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    let most = 0;
    for (let r = Math.floor(y * rows / h); r < Math.floor((y + 1) * rows / h); r++)
      for (let c = Math.floor(x * columns / w); c < Math.floor((x + 1) * columns / w); c++) {
        const value = number(r, c);
        if (isFinite(value) && Math.abs(value) > Math.abs(most)) most = value;
      }
    const opacity = Math.min(255, Math.round(255 * Math.abs(most) / full));
    pixels[y * w + x] = opacity << 24 | (most < 0 ? ORANGE : BLUE);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// Of a tensor, rows by columns; one head's attention, or all side by side.
function pictureOf(tensor, head) {  // at(row, column) is a number's index, cell(index) its place
  const [I, J, K] = tensor.shape, { data, strides: [step, stride] } = tensor;
  const [rows, columns, at, cell] =
    K && head === undefined ? [J, I * K, (r, c) => [Math.floor(c / K), r, c % K]]
      : K ? [J, K, (r, c) => [head, r, c], ([, r, c]) => [r, c]]
        : J ? [I, J, (r, c) => [r, c], index => index]
          : tensor.axes[0] === "position" ? [I, 1, r => [r], ([r]) => [r, 0]]
            : [1, I, (r, c) => [c], ([c]) => [0, c]];
  const number = J && !K ? (r, c) => data[r * step + c * stride]
    : (r, c) => data[tensor.flat(...at(r, c))];
  return { rows, columns, at, cell, number };
}

const tokens = () => inputs.map(id => [word(id), 1]);  // labels: words, how many rows they are for
const labels = (all, className, side, size) => make("div", { className, ariaHidden: true },
  all.map(([textContent, n]) => make("span", { textContent,
    style: `${side}:${n * size}px;font-size:${Math.max(6, Math.min(11, n * size))}px` })));
const attention = forward.find(c => c.outs.att);
function bandsOf({ name, axes, isWeight, shape }, columns) {  // of a picture's columns
  const { HS, NH, NKV, inp } = attention;
  if (name === inp.name && !isWeight)
    return [["query", NH * HS], ["key", NKV * HS], ["value", NKV * HS]];
  return shape.length === 3 && columns > 1 ? tokens() : [];
}

const bandOf = ({ tensor, index }) => tensor?.name === attention.inp.name && !tensor.isWeight
  ? `${CHANNELS[whose(attention, index[1])]} in ` : "";

let big = {};  // the canvas of the tensor that was shown last
function bigPicture() {  // of the tensor that is shown; click its cells
  const { mode, key, index, tensor, picture } = state, { rows, columns } = picture;
  const width = $("detail").clientWidth, room = width < 700 ? width - 70 : width * .46;
  const across = Math.min(28, room / columns), up = Math.max(.4, Math.min(15, 340 / rows));
  const [row, column] = picture.cell(index), { full } = tensor.limits;
  const place = ({ offsetX, offsetY }) =>
    picture.at(clamp(offsetY / up, rows - 1), clamp(offsetX / across, columns - 1));
  if (big.data !== tensor.data || big.head !== index[tensor.shape.length - 3])
    big = { data: tensor.data, head: index[tensor.shape.length - 3], canvas: draw(picture, full) };
  Object.assign(big.canvas, { role: "img", ariaLabel: tensor.title,
    style: `width:${columns * across}px;height:${rows * up}px`,
    onclick: event => go(mode, key, place(event), tensor.number),
    onpointermove: event => {
      const at = place(event);
      $("hover").textContent = `${tensor.label(at)} = ${say(tensor.num(...at))}`;
    } });
  const chosen = make("i", { style:
    `left:${column * across}px;top:${row * up}px;width:${across}px;height:${up}px` });
  const down = tensor.isWeight || tensor.axes.at(-2) !== "position" && rows !== T ? [] : tokens();
  return make("div", { className: "picture" },
    make("div", { className: "big", tabIndex: 0 },
      labels(bandsOf(tensor, columns), "across", "width", across),
      labels(down, "down", "height", up), make("div", {}, big.canvas, chosen)),
    make("p", { id: "hover" }, legend(full)), indexInputs());
}
const legend = full => [`−${say(full)}`, words("span", "", "legend"), `${say(full)} or more`];
function indexInputs() {
  const { mode, key, index, tensor } = state;
  return make("p", { className: "index" }, index.map((i, axis) => make("label", {},
    `${tensor.axes[axis]} `, make("input", { type: "number", value: i, min: 0, id: `axis${axis}`,
      max: tensor.shape[axis] - 1,
      onchange: ({ target }) => go(mode, key, index.with(axis, +target.value), tensor.number) }))));
}

const headGrid = (layers, number, chosen) =>  // all attention maps: a row a layer
  make("div", { className: "roving" }, layers.map((key, l) => make("div", { className: "heads" },
    words("span", `layer ${l}`), list(attention.NH, h => make("a", {
      href: at("attention", key, [h]), ariaCurrent: chosen === `${key},${h}` },
    draw({ rows: T, columns: T, number: (r, c) => number(l, h, r, c) }, 1), `head ${h}`)))));

// ---- what is shown ------------------------------------------------------------------------------

const plain = ({ name }) => data.words[name] ?? data.words[name.replace(/.*_/, "_")] ?? "";
const ofLayer = l => l === "" ? "" : ` of layer ${l}`;
const at = (mode, key = "", index = [], number = "") =>
  `#${mode}/${key}/${index.join(",")}${number === "" ? "" : `/${number}`}`;
function go(mode, key, index, number, replaces = false) {
  const hash = at(mode, key, index, number);
  if (!replaces) location.hash = hash;
  else {
    history.replaceState(null, "", hash);  // an arrow key makes no entry of the history
    show();
  }
}
const attKeys = forward.filter(c => c.outs.att).map(c => c.outs.att.key);
const written = arg => forward.findLast(c => c.outs[arg])?.outs[arg];
const losses = written("losses"), probs = written("probs");
const lossOf = () => losses.data.reduce((sum, x, t) => sum + x * shareOf(t), 0);
// mode; key, tensor, picture and index, if one is shown; given: the address's index
let state = {};

function read() {  // the address -> state; what is wrong in it is ignored
  const [mode, chosen, index = "", number] =
    decodeURIComponent(location.hash.slice(1)).split("/");
  const all = shownIn[mode] ?? newest, wanted = index.split(",").filter(Boolean).map(Number);
  const known = number && tensors[number];
  const key = known || all[chosen] ? chosen : mode === "attention" ? attKeys[0] : "";
  state = { mode: mode in MODES ? mode : "start", key, given: wanted, tensor: known || all[key] };
  if (state.mode === "attention" && !chosen && most().head.tensor) {
    ({ tensor: state.tensor, index: state.given } = most().head);
    state.key = state.tensor.key;
  }
  if (state.mode === "tour") {
    state.station = clamp(wanted[0], TOUR.length - 1);
    [state.tensor, state.given] = TOUR[state.station].find();
    state.key = state.tensor.key;
  }
  const { tensor, given } = state;
  if (!tensor) return;
  const first = tensor.isWeight ? [] : [0, T - 1, T - 2].slice(3 - tensor.shape.length);
  state.index = tensor.shape.map((n, axis) =>
    clamp(given[axis] ?? (tensor.shape.length === 3 ? first[axis] : axis ? 0 : first[0]), n - 1));
  state.picture = pictureOf(tensor, state.index[0]);
}

function tile(tensor, key, className) {
  const picture = pictureOf(tensor), isSmall = className !== "result";
  const [width, height] = isSmall ? [20, 14] : [104, 46];
  const canvas = make("canvas"), title = plain(newest[key] ?? tensor).split(": ");
  const across = Math.min(width, Math.max(8, picture.columns));
  canvas.style = `width:${across}px;height:${Math.min(height, Math.max(5, picture.rows))}px`;
  const label = tensor.title, name = isSmall || label.includes("(") ? "" : title[0];
  const a = make("a", { href: at(tensor.mode, key, [], tensor.number), className,
    title: `${label}, ${tensor.shape.join(" × ")}: ${plain(tensor)}` },
  canvas, words("span", name), words("code", label));
  a.dataset.number = tensor.number;
  const seen = new IntersectionObserver(found => found.at(-1).isIntersecting && setTimeout(() => {
    seen.disconnect();  // painted when it is first seen
    draw(pictureOf(tensor), tensor.limits.full, canvas, 2 * width, 2 * height);
  }), { rootMargin: "300px" });
  seen.observe(a);
  return a;
}

// The calls of the forward pass as blocks, each a branch of the residual stream: what it reads
// leaves the stream, and a sum brings its result back.
const sums = forward.filter(c => c.f === "residual_forward");
function blocks() {
  const begin = forward.findIndex(c => Object.values(c.outs).includes(sums[0].inp1));
  const ends = [begin, ...sums.map(c => forward.indexOf(c)), forward.length - 1];
  return ends.map((end, n) => {
    const made = forward.slice(n ? ends[n - 1] + 1 : 0, end + 1), sum = made.at(-1);
    const layer = Object.values(sum.outs)[0].layer, isBranch = sum.f === "residual_forward";
    const kind = made.some(c => c.outs.att) ? "attention" : "MLP";
    return { calls: isBranch ? made.slice(0, -1) : made, stream: isBranch ? sum.outs.out
      : n ? null : sums[0].inp1,
    title: isBranch ? `layer ${layer}: ${kind}` : n ? "prediction" : "embedding" };
  });
}

function drawMap(mode) {
  const all = shownIn[mode] ?? newest, from = ["backward", "update"].includes(mode) ? mode : "";
  const inGradients = new Set(Object.values(gradients));
  const tileOf = (t, className) => all[t.key] ? tile(all[t.key], t.key, className) : [];
  const boxes = c => {
    const outs = Object.values(c.outs).sort((a, b) => b.shape.length - a.shape.length);
    const isSmall = t => t.shape.length === 1 && t.arg !== "losses" || t.arg === "rstd";
    const main = outs.filter(t => !isSmall(t) && t !== sums[0].inp1);
    const weights = Object.values(c.ins).filter(t => t.isWeight);
    const stem = c.f.replace("_forward", ""), isOwn = t => t.kind === "gradient"
      && !inGradients.has(t) && t.layer === outs[0].layer && t.call.f === `${stem}_backward`;
    const others = mode === "backward" ? tensors.filter(isOwn) : [];
    const results = [main.map(t => tileOf(t, "result")), others.map(t => tile(t, t.key, "result"))];
    const small = [weights.map(t => tileOf(t, "weight")),
      outs.filter(isSmall).map(t => tileOf(t, "statistic"))].flat(Infinity);
    return results.flat(Infinity).length + small.length ? make("div", { className: "op" },
      words("b", stem), make("div", { className: "results" }, results),
      make("div", { className: "small" }, small)) : [];
  };
  $("map").dataset.mode = from;
  $("map").replaceChildren(...blocks().map(({ calls, stream, title }) =>
    make("div", { className: `block ${stream && title !== "embedding" ? "branch" : ""}` },
      words("h2", title), make("div", { className: "ops" }, calls.map(boxes)),
      stream ? make("div", { className: "stream" }, tileOf(stream, "result")) : [])));
}

// ---- an explanation -----------------------------------------------------------------------------

const namesOf = (c, tensor) => {  // of a tensor among a call's arguments
  const find = all => Object.keys(all).filter(name => all[name] === tensor);
  return [...find(c.ins), ...find(c.outs).map(name => name in c.ins ? `new_${name}` : name)];
};
function nodesOf(expression, scope, asNumbers) {
  if (expression[0] === "“") return [expression.slice(1, -1)];
  return expression.split(/([A-Za-z_]\w*)/).map((token, i, all) => {
    const part = i % 2 ? scope.get(token) : null, value = part?.value;
    if (!part || !asNumbers && !part.tensor) return token;
    const text = asNumbers ? say(value) : part.tensor.label(part.index);
    const node = part.tensor ? link(part.tensor, part.index, text) : text;
    return asNumbers && value < 0 && all.slice(0, i).join("").trim() ? ["(", node, ")"] : node;
  });
}

function sumOf(c, rows, expression) {  // its expression, with the tensors' names
  const names = new Map((rows[0]?.parts ?? []).filter(part => part.tensor)
    .flatMap(({ tensor }) => namesOf(c, tensor).map(name => [name, tensor.title])));
  return expression.replace(/[A-Za-z_]\w*/g, name => names.get(name) ?? name);
}
function stepsOf(c, made, label) {  // the lines of a formula, and the tables of its sums
  const scope = new Map(Object.entries(c).filter(([, x]) => typeof x === "number")
    .map(([name, value]) => [name, { value }])), tables = [];
  const lines = made.map((part, i) => {
    const { tensor, name, expression, value, rows } = part, isLast = i === made.length - 1;
    if (tensor) return void namesOf(c, tensor).forEach(name => scope.set(name, part));
    const before = made[i - 1], own = expression === "" && before?.tensor ? before : { value };
    scope.set(name, own);
    const title = isLast ? words("b", label) : words("i", name);
    if (rows) tables.push([rows, expression, isLast ? label : name]);
    const symbols = rows ? [`Σ ${sumOf(c, rows, expression)}, ${rows.length} terms`]
      : own.tensor ? [own.tensor.label(own.index)] : nodesOf(expression, scope, false);
    const isSum = rows || own.tensor || expression[0] === "“";
    const numbers = isSum ? [] : [" = ", nodesOf(expression, scope, true)];
    return make("p", {}, title, " = ", symbols, make("span", { className: "numbers" }, numbers),
      " = ", isLast ? make("output", { id: "value", textContent: say(value) })
        : own.tensor ? link(own.tensor, own.index, say(value)) : words("b", say(value)));
  }).filter(Boolean);
  return [make("div", { className: "made" }, lines), tables.map(x => termsOf(...x))];
}

function termsOf(rows, expression, name) {  // a sum's: a strip of all, and the largest in numbers
  const nested = rows.flatMap(row => row.parts).filter(part => part.rows);
  if (nested.length)
    return nested.map(part => termsOf(part.rows, part.expression, `${name}, ${part.name}`));
  if (!rows.length) return [];
  const partsOf = row => row.parts.filter(part => part.tensor || part.name);
  const columns = partsOf(rows[0]), [first] = columns;
  const hasTerm = columns.length > 1 || expression.includes("²");
  const changing = [...first.index.keys()].filter(axis =>
    rows.length === 1 || rows.some(row => partsOf(row)[0].index[axis] !== first.index[axis]));
  const which = ({ tensor, index }) => changing.map(axis =>
    tensor.inWords(index)[axis].replace(`${tensor.axes[axis]} `, "")).join(", ");
  const shown = largest(rows, 10, row => row.value);
  const rest = rows.filter(row => !shown.includes(row));
  const lines = shown.map(row => [which(partsOf(row)[0]), ...partsOf(row).map(linked),
    ...(hasTerm ? [say(row.value)] : [])]);
  const empty = columns.map(() => "").slice(hasTerm ? 0 : 1);
  if (rest.length) lines.push([`${rest.length} smaller`, ...empty,
    say(rest.reduce((sum, row) => sum + row.value, 0))]);
  const ofOne = i => new Set(rows.map(row => bandOf(partsOf(row)[i]))).size === 1;
  const head = (part, i) =>
    `${i ? "× " : ""}${ofOne(i) ? bandOf(part) : ""}${part.tensor?.title ?? part.name}`;
  const bands = [...columns.map((_, i) => row => partsOf(row)[i].value), row => row.value];
  const most = bands.map(value => Math.max(...rows.map(row => Math.abs(value(row)))) || 1);
  const strip = draw({ rows: bands.length, columns: rows.length,
    number: (r, i) => bands[r](rows[i]) / most[r] }, 1);
  strip.className = "strip";
  return make("div", { className: "terms" }, words("h3", `${name}: its ${rows.length} terms`),
    rows.length > 3 && columns.length > 1 ? make("div", { title:
      [...columns.map(head), "= terms"].join(", ") }, strip) : [],
    table(lines, [changing.map(axis => first.tensor.axes[axis]).join(", "), ...columns.map(head),
      ...(hasTerm ? ["= term"] : [])]));
}

function markedLines(lines, marks) {  // "a" a line that has it; "a…b": from a line to another
  const marked = new Set();
  for (const mark of marks.split("|")) {
    const [from, to] = mark.split("…"), begin = lines.findIndex(code => code.includes(from));
    const end = to ? lines.findIndex((code, i) => i > begin && `${code}\n`.includes(to))
      : begin;
    for (let i = begin; begin >= 0 && i <= end; i++) marked.add(i);
  }
  return marked;
}
function sourceOf(c, index, mark) {
  const { text, line, file } = data.source[c.f], lines = text.trimEnd().split("\n");
  const marked = mark ? markedLines(lines, mark.call ? mark(c, ...index) : mark) : new Set();
  const isNear = i => !i || !marked.size || [i - 1, i, i + 1].some(n => marked.has(n));
  const all = button("all of it", () => figure.classList.add("all"));
  const figure = make("figure", {}, make("figcaption", {}, words("code", c.f), ` ${file}:${line} `,
    all), make("pre", { tabIndex: 0, ariaLabel: `source of ${c.f}` }, lines.map((code, i) =>
    words(marked.has(i) ? "mark" : "span", `${code}\n`, isNear(i) ? isNear(i + 1) ? "" : "gap"
      : "far"))));
  return figure;
}

function howMade(tensor, index) {  // with the lines of the source that compute it
  const c = tensor.call, { formula } = tensor, label = tensor.label(index);
  if (!formula) return [make("p", {}, "No formula is written for this layer: ",
    make("output", { id: "value", textContent: say(tensor.num(...index)) })), sourceOf(c, index)];
  const made = [], whole = [...index, 0, 0].slice(0, 3);
  noting(made, () => formula.of(c, ...whole));
  const [steps, tables] = stepsOf(c, made, label), { why } = formula;
  const shown = PICTURES[c.f]?.(tensor, index) ?? [];
  const reason = why ? make("div", { className: "why" },
    words("p", why.call ? why(c, ...whole) : why), shown) : [];
  return [steps, reason, sourceOf(c, whole, formula.mark),
    make("div", { className: "both" }, make("div", {}, tables), bigPicture())];
}

const svg = (size, text, label) => make("div", { className: "svg", innerHTML: `<svg viewBox="-1.2 ${
  -1.2} 2.4 2.4" width="${size}" role="img" aria-label="${label}">${text}</svg>` });
const PICTURES = {  // what a picture says better
  rope_forward: (tensor, [t, j]) => {  // the pair of channels as an arrow, before and after
    const c = tensor.call, even = j - j % 2;
    if (j >= c.heads * c.HS) return [];
    const before = [0, 1].map(i => c.ins.qkv.num(t, even + i));
    const after = [0, 1].map(i => tensor.num(t, even + i)), size = Math.hypot(...before) || 1;
    const arrow = ([x, y], style) => `<line x2="${x / size}" y2="${-y / size}" ${style} />`;
    const arrows = svg(110, `<circle r="1" />${arrow(before, "class=before")}${arrow(after, "")}`,
      "the pair as an arrow, turned");
    return [make("div", { className: "side" }, arrows, words("p", `Channels ${even} and ${even + 1} `
      + `at position ${t}, as an arrow: before (thin) and after it was turned.`))];
  },
  muon_update: (tensor, [i]) => {  // how long a matrix's directions are, before and after
    const c = tensor.call;
    if (c.m.whole || tensor.kind !== "move") return [];
    const { rows, columns, before, after } =
      directionsOf(c, Math.floor(i / (c.param.shape[0] / c.blocks)));
    const [old, now] = [before, after].map(x => lengthsOf(x, rows, columns)), most = old[0];
    const bars = (all, most) => draw({ rows: 24, columns: all.length,
      number: (r, n) => all[n] / most > 1 - (r + 1) / 24 ? 1 : 0 }, 1);
    return [make("div", { className: "side" }, bars(old, most), bars(now, Math.max(...now)),
      words("p", `By how much it stretches its ${old.length} directions, before: ${say(most)} to ${
        say(old.at(-1))}; after: ${say(now[0])} to ${say(now.at(-1))}: a few steps get most of `
        + "them near 1, and leave the least ones small."))];
  },
};

const MEANING = {
  forward: t => plain(t).split(": ").slice(1).join(": "),
  backward: t => t.of === undefined ? "on its way back: a call out of order has still to be undone"
    : `how much the loss changes for each +1 of ${t.title.slice(1)}`,
  update: t => t.kind === "move" ? `how far ${t.call.f} moves ${t.name}`
    : `the optimizer's: a running mean of the gradient${t.arg === "v" ? "'s square" : ""}`,
};
const nameOf = t => t.kind === "params" || t.kind === "acts" ? plain(t).split(": ")[0] : "";
function drawTensor() {
  const { tensor, index } = state, meaning = MEANING[tensor.mode](tensor);
  const title = make("h2", {}, nameOf(tensor), " ", words("code", tensor.title),
    words("small", `${ofLayer(tensor.layer)}, ${tensor.shape.join(" × ")}`));
  const own = `${tensor.label(index)}: ${tensor.inWords(index).join(", ")}`;
  $("said").textContent = `${own}: ${say(tensor.num(...index))}`;
  return make("article", {}, title, make("p", { className: "meaning" },
    meaning ? `${meaning}. ` : "", make("span", { className: "own" }, own)),
  tensor.by === null ? [make("p", {}, tensor.kind === "params" ? "Training made this weight: "
    : tensor.kind === "state" ? "The steps before this one made it: " : "It is given: ",
  make("output", { textContent: say(tensor.num(...index)) })), slider(), bigPicture()]
    : howMade(tensor, index), forwardAndBack());
}
function forwardAndBack() {  // the same number in the other passes
  const { tensor, index } = state, seen = ["forward", "backward", "update"].flatMap(mode => {
    const other = shownIn[mode][tensor.key];
    const fits = other && other !== tensor && other.shape.length === index.length && !other.whole
      && !tensor.whole;
    return fits ? [make("a", { href: other.href(index) },
      `${mode}: ${other.label(index)} = ${say(other.num(...index))}`)] : [];
  });
  return seen.length ? make("p", { className: "others" }, "The same place: ",
    seen.flatMap((a, i) => i ? [", ", a] : a)) : [];
}
