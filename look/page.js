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
const percent = p => `${p < .01 ? (100 * p).toFixed(1) : Math.round(100 * p)}%`;

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
const attention = forward.find(c => c.f === "attention_forward");
function bandsOf({ name, axes, isWeight, shape }, columns) {  // of a picture's columns
  const { HS, NH, NKV, inp } = attention;
  if (name === inp.name && !isWeight)
    return [["query", NH * HS], ["key", NKV * HS], ["value", NKV * HS]];
  return shape.length === 3 && columns > 1 ? tokens() : [];
}

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
const attKeys = forward.filter(c => c.f === "attention_forward").map(c => c.outs.att.key);
const lossOf = () => newest["losses|"].data.reduce((sum, x) => sum + x, 0) / T;
let state = {};  // mode; key, tensor, picture and index, if one is shown; given: the address's index

function read() {  // the address -> state; what is wrong in it is ignored
  const [mode, chosen, index = "", number] =
    decodeURIComponent(location.hash.slice(1)).split("/");
  const all = shownIn[mode] ?? newest, wanted = index.split(",").filter(Boolean).map(Number);
  const known = number && tensors[number];
  const key = known || all[chosen] ? chosen : mode === "attention" ? attKeys[0] : "";
  state = { mode: mode in MODES ? mode : "start", key, given: wanted, tensor: known || all[key] };
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
    const kind = made.some(c => c.f === "attention_forward") ? "attention" : "MLP";
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
    return make("p", {}, title, " = ", symbols,
      isSum ? [] : [make("span", { className: "numbers" }, " = ", nodesOf(expression, scope, true))],
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
  const shown = largest(rows, 10, row => row.value), rest = rows.filter(row => !shown.includes(row));
  const lines = shown.map(row => [which(partsOf(row)[0]), ...partsOf(row).map(linked),
    ...(hasTerm ? [say(row.value)] : [])]);
  if (rest.length) lines.push([`${rest.length} smaller`, ...columns.map(() => "").slice(hasTerm ? 0 : 1),
    say(rest.reduce((sum, row) => sum + row.value, 0))]);
  const head = (part, i) => `${i ? "× " : ""}${part.tensor?.title ?? part.name}`;
  const bands = [...columns.map((_, i) => row => partsOf(row)[i].value), row => row.value];
  const most = bands.map(value => Math.max(...rows.map(row => Math.abs(value(row)))) || 1);
  const strip = draw({ rows: bands.length, columns: rows.length,
    number: (r, i) => bands[r](rows[i]) / most[r] }, 1);
  strip.className = "strip";
  return make("div", { className: "terms" }, words("h3", `${name}: its ${rows.length} terms`),
    rows.length > 3 && columns.length > 1 ? make("div", { title:
      [...columns.map((part, i) => head(part, 0)), "their products"].join(", then ") }, strip) : [],
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

function howMade(tensor, index) {  // and its function's source; the lines that compute it are marked
  const c = tensor.call, { formula } = tensor, label = tensor.label(index);
  if (!formula) return [make("p", {}, "No formula is written for this layer: ",
    make("output", { id: "value", textContent: say(tensor.num(...index)) })), sourceOf(c, index)];
  const made = [], whole = [...index, 0, 0].slice(0, 3);
  noting(made, () => formula.of(c, ...whole));
  const [steps, tables] = stepsOf(c, made, label), { why } = formula;
  return [steps, why ? words("p", why, "why") : [], sourceOf(c, whole, formula.mark),
    make("div", { className: "both" }, make("div", {}, tables), bigPicture())];
}

const MEANING = {
  forward: t => plain(t).split(": ").slice(1).join(": "),
  backward: t => t.of === undefined ? "on its way back: a call out of order has still to be undone"
    : `how much the loss changes for each +1 of ${t.title.slice(1)}`,
  update: t => t.kind === "move" ? `how far ${data.update.optimizer} moves ${t.name}`
    : `the optimizer's: a running mean of the gradient${t.arg === "v" ? "'s square" : ""}`,
};
const nameOf = t => t.kind === "params" || t.kind === "acts" ? plain(t).split(": ")[0] : "";
function drawTensor() {
  const { tensor, index } = state, meaning = MEANING[tensor.mode](tensor);
  const title = make("h2", {}, nameOf(tensor) ? `${nameOf(tensor)} ` : "", words("code", tensor.title),
    words("small", `${ofLayer(tensor.layer)}, ${tensor.shape.join(" × ")}`));
  const own = `${tensor.label(index)}: ${tensor.inWords(index).join(", ")}`;
  $("said").textContent = `${own}: ${say(tensor.num(...index))}`;
  return make("article", {}, title, make("p", { className: "meaning" }, meaning ? `${meaning}. ` : "",
    make("span", { className: "own" }, own)),
  tensor.by === null ? [make("p", {}, tensor.isWeight && tensor.kind === "params"
    ? "Training made this weight: " : "It is given: ",
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

// ---- pages --------------------------------------------------------------------------------------

const chainOf = (tensor, index) => {  // from a move back to the loss, along the largest terms
  const chain = [];
  for (let n = 0; tensor && tensor.by !== null && n < 60; n++) {
    chain.push({ tensor, index });
    const made = [];
    if (!tensor.formula) break;
    noting(made, () => tensor.formula.of(tensor.call, ...[...index, 0, 0].slice(0, 3)));
    const flat = (all, value) => all.flatMap(part => part.rows
      ? part.rows.flatMap(row => flat(row.parts, row.value))
      : ["gradient", "state"].includes(part.tensor?.kind) && part.tensor.by !== null
        ? [{ ...part, size: Math.abs(value ?? part.value) }] : []);
    const [next] = flat(made).toSorted((a, b) => b.size - a.size);
    [tensor, index] = next ? [next.tensor, next.index] : [];
  }
  return chain;
};
function most() {  // the most surprising token, and the head that looks most strikingly there
  const losses = Array.from(newest["losses|"].data), t = losses.indexOf(Math.max(...losses));
  let head = { p: -1 };
  for (const key of attKeys) for (let h = 0; h < attention.NH; h++) for (let x = 1; x < t; x++) {
    const p = newest[key].data[newest[key].flat(h, t, x)];
    if (p > head.p) head = { p, tensor: newest[key], index: [h, t, x] };
  }
  return { t, head };
}
function mostMoved() {
  return Object.values(moves).map(tensor => {
    const { low, high } = tensor.limits, move = -low > high ? low : high;
    return { tensor, move, index: tensor.indexOf(tensor.data.indexOf(move)) };
  }).sort((a, b) => Math.abs(b.move) - Math.abs(a.move));
}

function drawStart() {
  const { t, head } = most(), loss = newest["losses|"].data[t], probs = newest["probs|"];
  const guesses = best(probs, t, 3).map(([id, p]) => `“${word(id)}” ${percent(p)}`).join(", ");
  const before = inputs.slice(Math.max(0, t - 18), t + 1).map(word).join("");
  const cards = [make("div", { className: "card" }, words("h3", "The most surprising token"),
    make("p", {}, "After ", words("q", before), " came ", words("mark", word(targets[t])),
      `. The model gave it ${percent(Math.exp(-loss))}, and rather expected ${guesses}.`),
    make("p", {}, link(newest["losses|"], [t], `Why is its loss ${say(loss)}?`), " · ",
      make("a", { href: `#guesses//${t}`, textContent: "What did each layer guess?" })))];
  if (head.tensor) cards.push(make("div", { className: "card" },
    words("h3", "The head that looks most strikingly, there"),
    make("div", { className: "side" }, draw(pictureOf(head.tensor, head.index[0]), 1),
      make("p", {}, `Head ${head.index[0]}${ofLayer(head.tensor.layer)}: at position ${position(t)}, `
        + `it looks at ${position(head.index[2])} with ${percent(head.p)}.`)),
    link(head.tensor, head.index, "Why there?")));
  const moved = make("div", { className: "card" }, words("h3", "The weight that moves most"),
    words("p", "…"));
  const later = () => {
    const [{ tensor, index, move }] = mostMoved();
    const chain = tensor.whole ? chainOf(gradients[tensor.key], tensor.inWhole(index))
      : chainOf(tensor, index);
    moved.lastChild.replaceWith(make("p", {}, `${tensor.label(index)}${ofLayer(tensor.layer)} moves `
      + `by ${say(move)}. `, link(tensor, index, "Why that far?")),
    ...(chain.length ? [make("p", {}, "From there back to the loss, along the largest terms: ",
      chain.slice(tensor.whole ? 0 : 1).flatMap((x, i) => [i ? " ← " : "", link(x.tensor, x.index,
        x.tensor.label(x.index))]))] : []));
    const tiles = new Set(chain.map(x => `${x.tensor.key}`));
    for (const a of document.querySelectorAll("#map a[data-number]"))
      a.classList.toggle("chain", tiles.has(tensors[a.dataset.number].key));
  };
  setTimeout(later, 50);
  return [words("h2", "From a text to a loss, and from the loss to every weight"),
    words("p", "On the left, the model: the residual stream goes up, attention and MLPs branch off "
      + "and add to it. Each picture is a tensor of this step: blue is positive, orange negative. "
      + "Click one, then one of its numbers, to see what made it, and the line of the trainer "
      + "that did."),
    make("div", { className: "cards" }, cards, moved),
    make("p", {}, make("a", { className: "button", href: "#tour//0",
      textContent: "A tour in ten stations" }), " ",
    make("a", { className: "button", href: "#training", textContent: "Training, as a film" }))];
}

const BACKWARD = [
  "d in front of a name means: how much the loss changes for each +1 of it. dln1[5, 3] = −0.02 says:"
  + " if ln1[5, 3] were larger by 0.01, the loss would be lower by 0.0002.",
  "No number reaches the loss directly: it changes the next ones, and these the loss. The chain "
  + "rule adds up all ways: dx is the sum over everything that x went into of how much that changes "
  + "with x, times its own d. So the backward pass goes through the calls from the last to the "
  + "first, and each needs only the d of its result.",
  "Where two ways part, their gradients are added: that is why the stream hands its gradient down "
  + "whole, and each branch adds its own."];
function drawPass() {
  if (state.key) return drawTensor();
  if (state.mode === "update") return drawUpdate();
  if (state.mode === "backward") return [
    words("h2", "Backward: how the loss changes with each number"),
    BACKWARD.map(text => words("p", text)),
    make("p", {}, "See it: ", link(gradients[sums.at(-1).inp2.key], [T - 1, 0]), ", or ",
      link(gradients[attention.inp.key], [T - 1, 0]), ".")];
  return [words("h2", "Forward: from tokens to a loss"),
    words("p", "The step goes up, from the embedding to the loss. Dashed: a weight. Arrow keys "
      + "move, Escape goes up, / finds a tensor."),
    words("p", `The loss is ${say(lossOf())}, the mean over the positions. Of each: what came, `
      + "with its probability, the loss, and the likeliest tokens."),
    outcomes(Array.from(newest["losses|"].data), list(T, t => best(newest["probs|"], t, 3)),
      (loss, t) => link(newest["losses|"], [t], say(loss)))];
}

function drawUpdate() {
  const { optimizer, step, rate, peak, norm, grad_scale: scale, grad_clip: clip } = data.update;
  return [words("h2", `Update: how far ${optimizer} moves each weight`),
    words("p", `If the model were trained on this prompt next: step ${step}. The settings are `
      + `${data.update.whose}: a learning rate of ${say(rate)} there, ${say(peak)} at its peak.`
      + (norm === null ? "" : ` The gradient's norm is ${say(norm)}`
        + (scale < 1 ? `, above ${clip}: all gradients are multiplied by ${say(scale)}.` : "."))
      + (data.alive ? "" : " Of each matrix, a tile has the rows and columns with the largest "
        + "moves.")),
    words("h3", "The weights that move most, one of each tensor"),
    table(mostMoved().slice(0, 12).map(({ tensor, index, move }) =>
      [link(tensor, index), say(move)]))];
}

function drawAttention() {
  const { tensor, index: [head, t] } = state;
  state.position = t;
  return [titled("Where each head looks",
    words("p", "A row is a position, the first on top; its columns are the positions up to it. "
      + "Full color: 1."),
    headGrid(attKeys, (l, h, r, c) => newest[attKeys[l]].data[newest[attKeys[l]].flat(h, r, c)],
      `${tensor.key},${head}`)),
  make("div", { id: "head" }, drawTensor())];
}

function best(probs, t, count) {  // [[id, probability] * count], the likeliest first
  const row = probs.data.subarray(t * probs.shape[1], (t + 1) * probs.shape[1]), found = [];
  for (let n = 0; n < Math.min(count, row.length); n++) {
    let most = -1;
    row.forEach((p, id) => {
      if ((most < 0 || p > row[most]) && !found.some(([other]) => other === id)) most = id;
    });
    found.push([most, row[most]]);
  }
  return found;
}
const shade = (p, most, paper) =>
  `background:color-mix(in srgb, var(--accent) ${Math.round(most * p)}%, ${paper})`;
const guess = ([id, p], target) => make("td", { className: id === target ? "guess right" : "guess",
  textContent: `${word(id)} ${Math.round(100 * p)}%`, style: shade(p, 40, "transparent") });
const outcomes = (losses, guesses, cell = say) => table(losses.map((loss, t) =>
  [position(t), `“${word(targets[t])}” ${say(Math.exp(-loss))}`, cell(loss, t),
    ...guesses[t].slice(0, 3).map(x => guess(x, targets[t]))]),
["after", "came", "loss", "guesses"]);

// The probabilities as if no layer followed: the calls after the last sum run on an earlier stream.
function lens(stream) {
  const last = sums.at(-1).outs.out, copies = new Map([[last, stream]]);
  let made;
  for (const c of forward.slice(forward.indexOf(sums.at(-1)) + 1)) {
    const ins = Object.fromEntries(Object.entries(c.ins).map(([k, t]) => [k, copies.get(t) ?? t]));
    const outs = Object.fromEntries(Object.entries(c.outs).map(([name, t]) => {
      const fields = { numbers: null, found: null };
      copies.set(t, Object.assign(Object.create(Tensor.prototype), t, fields));
      return [name, copies.get(t)];
    }));
    const sizes = Object.fromEntries(Object.entries(c).filter(([, x]) => typeof x === "number"));
    const copy = { ...sizes, ...outs, ...ins, f: c.f, ins, outs, shared: {} };
    for (const t of Object.values(outs)) t.own = copy;
    made = outs.probs ?? made;
  }
  return made;
}
const streams = () => [sums[0].inp1, ...attKeys.map((_, l) =>
  sums.filter(c => c.outs.out.layer === l).at(-1).outs.out)];
function dependsOf(t) {  // of the loss at t on each token: gradient with respect to it, times it
  const [stream] = streams(), gradient = gradients[stream.key];
  lossWeights(x => +(x === t));
  forget(["gradient"]);
  const found = list(t + 1, i => quietly(() => dot("", "", stream.shape[1],
    gradient, gradient.flat(i), 1, stream, stream.flat(i), 1)));
  lossWeights();
  forget(["gradient"]);
  return found;
}
let temperature = 1;
function drawGuesses() {
  const t = state.position = clamp(state.given[0], T - 1), layers = streams().map(lens);
  const loss = newest["losses|"].data[t], logits = newest["probs|"].call.logits;
  const row = list(logits.shape[1], id => logits.num(t, id) / temperature);
  const at = id => quietly(() => softmax({ shared: {} }, 0, row.length, i => row[i], id, ""));
  const warm = { shape: [1, row.length], data: Float32Array.from(row, (_, id) => at(id)) };
  const depends = dependsOf(t);
  return [titled("The best guess after each layer",
    words("p", "The residual stream after each layer, read as if it were the last. Underlined: the "
      + "token that came."),
    table(inputs.map((_, t) => [make("a", { href: `#guesses//${t}`, textContent: position(t) }),
      ...layers.map(probs => guess(best(probs, t, 1)[0], targets[t])), `“${word(targets[t])}”`]),
    ["after", ...layers.map((_, l) => l ? `layer ${l - 1}` : "embedding"), "came"])),
  titled(`After ${position(t)} came “${word(targets[t])}”`,
    words("p", `Loss ${say(loss)}. The five best guesses:`),
    table(best(newest["probs|"], t, 5).map(([id, p]) =>
      [`“${word(id)}”`, link(newest["probs|"], [t, id], say(p))])),
    make("p", {}, make("label", {}, `Temperature ${temperature}: `, make("input", { type: "range",
      id: "temperature", min: .1, max: 2, step: .1, value: temperature, oninput: ({ target }) => {
        temperature = +target.value;
        show();
      } })), " Logits are divided by it before the softmax, when text is drawn: ",
    best(warm, 0, 4).map(([id, p]) => `“${word(id)}” ${percent(p)}`).join(", ")),
    words("p", "How much that loss depends on each token: the gradient with respect to where the "
      + "stream begins, times that. Positive: more of it would raise the loss."),
    make("div", { id: "depends" }, table(largest(depends.map((x, i) => [i, x]), 10, ([, x]) => x)
      .map(([i, x]) => [position(i), say(x)]))))];
}

let playing = 0;
function drawTraining() {
  const frames = data.film, last = frames.length - 1, n = clamp(state.given[0] ?? last, last);
  const frame = frames[n], isOther = `${data.ids.slice(0, -1)}` !== `${inputs}`;
  if (!frame || isOther) return [titled("Training, as a film", words("p", isOther
    ? "The film is of the prompt that the page was written for: reload it to see that one."
    : "It needs a run with several checkpoints: train with -n 100 -o runs/mine, then look at "
      + "runs/mine."))];
  const size = T * T, heads = attention.NH;
  const att = numbers.subarray(frame.att, frame.att + attKeys.length * heads * size);
  const to = (frame, replaces = true) => go("training", "", [frame], "", replaces);
  const play = () => {
    clearInterval(playing);
    let next = 0;
    playing = setInterval(() => next <= last && state.mode === "training" ? to(next++)
      : clearInterval(playing), 400);
  };
  return [titled(`The prompt at step ${frame.step}: loss ${say(frame.loss)}`,
    make("p", {}, button("▶ play", play, "play"), " ",
      make("input", { type: "range", id: "frame", min: 0, max: last, value: n,
        ariaLabel: "checkpoint", oninput: ({ target }) => to(target.value) })),
    table([["loss", ...frames.map(f => say(f.loss))], ...frame.norms.map((_, l) =>
      [l ? `after layer ${l - 1}` : "embedding", ...frames.map(f => say(f.norms[l]))])],
    ["step", ...frames.map(f => `${f.step}`)]),
    words("p", "It is the loss of this prompt alone, which may rise while that of the training "
      + "text falls. Below it: the size of the residual stream, its root mean square."),
    headGrid(attKeys, (l, h, r, c) => att[((l * heads + h) * T + r) * T + c])),
  outcomes(frame.losses, frame.guesses)];
}

// ---- a tour -------------------------------------------------------------------------------------

const written = (f, arg) => {
  const c = forward.find(c => c.f.endsWith(f));
  return c?.outs[arg];
};
const atMost = tensor => [tensor, [most().t, 0]];
const TOUR = [
  ["A token becomes numbers", "Each token is looked up in a table of weights: a row of numbers. "
    + "This is all the model knows of it at first.", () => atMost(written("encoder_forward", "out"))],
  ["Each layer reads a normalized stream", "The rows go up, as the residual stream. A layer first "
    + "brings each to one size, so that it need not care how much was added before.",
  () => atMost(written("norm_forward", "out"))],
  ["Query, key and value", "From each row, three are made, by weights: what the position asks for, "
    + "what it offers, and what it hands over.", () => atMost(written("matmul_forward", "out"))],
  ["A head decides where to look", "The query of a position is multiplied with the keys of all up to "
    + "it: the better they fit, the more it looks there.", () => {
    const { head } = most();
    return head.tensor ? [head.tensor, head.index] : [newest[attKeys[0]], [0, T - 1, 0]];
  }],
  ["It gathers what it looks at", "The values of those positions are averaged, by how much the head "
    + "looks at each.", () => atMost(attention.outs.out)],
  ["The stream is added to", "What attention found is added: nothing is lost, and later layers can "
    + "read it.", () => atMost(sums[0].outs.out)],
  ["The MLP looks for patterns", "Each hidden number answers to one pattern of the stream. The MLP "
    + "then adds what follows from the patterns it found.", () => atMost(sums[1].inp2)],
  ["Probabilities, and a loss", "The last row of the stream is compared with every token's row of "
    + "the classifier. The loss is how surprised the model is by the token that came.",
  () => [newest["losses|"], [most().t]]],
  ["The way back", "Which way should each logit go? Every one down by its probability, the right one "
    + "up. From here, the chain rule goes back to all weights.",
  () => [gradients[written("cap_forward", "logits")?.key ?? forward.find(c => c.outs.probs).logits.key],
    [most().t, targets[most().t]]]],
  ["The weight that moves most", "Its gradient, and those of the steps before, say where it goes and "
    + "how far. All weights move so, and the next step begins.",
  () => { const [{ tensor, index }] = mostMoved(); return [tensor, index]; }],
].map(([title, text, find]) => ({ title, text, find }));
function drawTour() {
  const { station } = state, { title, text } = TOUR[station];
  const to = (n, words) => n in TOUR ? make("a", { className: "button", href: `#tour//${n}`,
    textContent: words, id: `to${words}` }) : [];
  return [make("div", { className: "card station" }, words("h3", `${station + 1} of 10: ${title}`),
    words("p", text), make("p", {}, to(station - 1, "back"), " ", to(station + 1, "next"))),
  drawTensor()];
}

// ---- alive: another prompt, another weight, steps of training -----------------------------------

const losses = [];  // of the steps made in the page
function changed() {  // all is computed anew when it is read
  drawMap(state.mode);
  show();
  drawAlive();
}
function idsOf(text) {  // or the first character that is not in the vocabulary
  const ids = Array.from(text, c => data.vocabulary.indexOf(c));
  return ids.includes(-1) ? Array.from(text)[ids.indexOf(-1)] : ids;
}
function drawAlive() {
  if (!data.alive) return $("alive").replaceChildren(words("span", "This model is only to be looked "
    + "at: one of at most 800,000 weights, like d2, can also be changed and trained here."));
  const field = make("input", { id: "typed", placeholder: "type another prompt",
    ariaLabel: "another prompt", maxLength: data.most + 1, onchange: ({ target }) => {
      const ids = idsOf(target.value);
      target.setCustomValidity(typeof ids === "string" ? `“${ids}” is not in the vocabulary`
        : ids.length < 3 ? "at least 3 tokens" : "");
      if (!target.reportValidity()) return;
      usePrompt(ids);
      changed();
    } });
  const rate = make("input", { id: "rate", type: "number", step: "any", min: 0, ariaLabel: "rate",
    value: $("rate")?.value ?? Number(data.update.peak.toPrecision(3)) });
  const steps = count => {
    for (let n = 0; n < count; n++) {
      if (!losses.length) losses.push(lossOf());
      train(+rate.value);
      losses.push(lossOf());
    }
    changed();
  };
  $("alive").onsubmit = event => event.preventDefault();
  $("alive").replaceChildren(...(data.typed ? [field] : []),
    button("train one step", () => steps(1), "train"), button("ten", () => steps(10), "ten"),
    make("label", {}, "rate ", rate),
    words("output", losses.length ? `loss ${losses.slice(-6).map(say).join(" → ")}` : ""));
}
let moved = null;  // a weight that was dragged: where it was, and the loss and gradient then
function slider() {
  const { tensor, index } = state, i = tensor.flat(...index), { full } = tensor.limits;
  if (!data.alive || tensor.kind !== "params") return [];
  if (moved?.tensor !== tensor || moved.i !== i)
    moved = { tensor, i, from: tensor.data[i], loss: lossOf(),
      slope: gradients[tensor.key].num(...index) };
  const text = () => {
    const by = tensor.data[i] - moved.from;
    return by ? `moved by ${say(by)}: the loss from ${say(moved.loss)} by ${
      say(lossOf() - moved.loss)}; its gradient foretold ${say(by * moved.slope)}`
      : `drag it: its gradient is ${say(moved.slope)}`;
  };
  const told = make("output", { id: "told", textContent: text() });
  return make("p", {}, make("label", {}, "change it ", make("input", { type: "range", id: "weight",
    min: moved.from - 5 * full, max: moved.from + 5 * full, step: full / 50, value: tensor.data[i],
    oninput: ({ target }) => {
      tensor.data[i] = +target.value;
      tensor.found = null;
      forget();
      told.textContent = text();
    }, onchange: changed })), " ", told);
}

// ---- the page -----------------------------------------------------------------------------------

function drawPrompt() {  // the likelier a token's successor was, the bluer
  const { mode, key, index: [head] = [0] } = state, losses = newest["losses|"].data;
  const where = t => mode === "attention" ? [mode, key, [head, t, 0]] : ["guesses", "", [t]];
  $("prompt").replaceChildren(...inputs.map((id, t) => make("li", {}, make("a", {
    href: at(...where(t)), textContent: word(id), ariaCurrent: t === state.position,
    title: `position ${t}; then “${word(targets[t])}” came, loss ${say(losses[t])}`,
    style: shade(Math.exp(-losses[t]), 60, "var(--card)") }))));
  $("summary").textContent = `${data.path}: ${data.title}, ${data.model}. `
    + `${T} tokens, loss ${say(lossOf())}`;
}

const MODES = { start: drawStart, forward: drawPass, backward: drawPass, update: drawPass,
  attention: drawAttention, guesses: drawGuesses, training: drawTraining, tour: drawTour };

function roving() {  // a group of links is one stop of the Tab key; arrows move within
  for (const group of document.querySelectorAll(".roving")) {
    const all = [...group.querySelectorAll("a")];
    const own = all.find(a => a.ariaCurrent === "true") ?? all[0];
    for (const a of all) a.tabIndex = a === own ? 0 : -1;
  }
}

function show() {
  const { id } = document.activeElement, wasIn = $("detail").contains(document.activeElement);
  const before = `${state.mode}${state.key}`;
  read();
  const hasMap = ["start", "forward", "backward", "update", "tour"].includes(state.mode);
  document.querySelector("main").className = hasMap ? "" : "one";
  $("map").hidden = !hasMap;
  $("detail").replaceChildren(...[MODES[state.mode]()].flat(Infinity));
  const mode = state.tensor?.mode ?? state.mode, shown = mode in shownIn ? mode : "";
  if (hasMap && ($("map").dataset.mode !== (shown === "forward" ? "" : shown)
    || !$("map").children.length)) drawMap(mode);
  const nav = state.mode === "tour" ? "#tour//0" : `#${state.mode}`;
  for (const a of document.querySelectorAll("nav a")) a.ariaCurrent = a.hash === nav;
  for (const a of document.querySelectorAll("#map a"))
    a.ariaCurrent = +a.dataset.number === state.tensor?.number;
  const current = $("map").querySelector("[aria-current=true]"), isNew = before !== `${state.mode}${
    state.key}`;
  if (isNew && innerWidth > 800) current?.scrollIntoView({ block: "nearest" });
  drawPrompt();
  roving();
  const focus = id && $(id) || wasIn && $("detail").querySelector("h2");
  if (focus) Object.assign(focus, focus.matches("h2") ? { tabIndex: -1 } : {})
    .focus({ preventScroll: true });
  if (innerWidth <= 800 && isNew && state.key) ($("head") ?? $("detail")).scrollIntoView();
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
addEventListener("keydown", event => {
  const { mode, key, index, picture, tensor } = state, arrow = ARROWS[event.key];
  if (event.target.matches("input:not(#theme)")) return;
  const group = event.target.closest(".roving");
  if (event.key === "/") $("find").focus();
  else if (event.key === "Escape") location.hash = key ? `#${tensor.mode}` : "#start";
  else if (arrow && group) {
    const all = [...group.querySelectorAll("a")], step = arrow[0] + arrow[1];
    all[(all.indexOf(event.target) + step + all.length) % all.length].focus();
  } else if (arrow && key) {
    const [r, c] = picture.cell(index).map((i, axis) => i + arrow[axis]);
    if (r >= 0 && c >= 0 && r < picture.rows && c < picture.columns)
      go(mode === "tour" ? tensor.mode : mode, key, picture.at(r, c), tensor.number, true);
  } else return;
  event.preventDefault();
});

const found = {};  // what one types -> where it is: "qkv 1", "dqkv 1"
for (const mode in shownIn) for (const [key, tensor] of Object.entries(shownIn[mode])) {
  const [name, l] = key.split("|"), own = mode === "backward" ? `d${name}` : tensor.title;
  found[own + (l && ` ${l}`)] = [mode, key];
}
$("names").append(...Object.keys(found).map(value => make("option", { value })));
$("find").onchange = ({ target }) => {
  const text = target.value.trim(), where = found[text] ?? found[`${text} 0`];
  target.setCustomValidity(where ? "" : "no such tensor");
  if (!target.reportValidity()) return;
  target.value = "";
  target.blur();
  go(...where);
};

addEventListener("hashchange", show);
unpack().then(() => {
  usePrompt(data.ids);
  drawAlive();
  show();
});
