// The views, and a tour through them.

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
  const t = losses.data.indexOf(Math.max(...losses.data));
  let head = { p: -1 };
  for (const key of attKeys) for (let h = 0; h < attention.NH; h++) for (let x = 1; x < t; x++) {
    const p = newest[key].data[newest[key].flat(h, t, x)];
    if (p > head.p) head = { p, tensor: newest[key], index: [h, t, x] };
  }
  return { t, head };
}
function mostMoved() {  // of each tensor one; first those that the optimizer itself moves
  const isOwn = ({ tensor }) => tensor.call.f === `${data.update.optimizer.toLowerCase()}_update`;
  return Object.values(moves).map(tensor => {
    const { low, high } = tensor.limits, move = -low > high ? low : high;
    return { tensor, move, index: tensor.indexOf(tensor.data.indexOf(move)) };
  }).sort((a, b) => isOwn(b) - isOwn(a) || Math.abs(b.move) - Math.abs(a.move));
}
function memoryOf({ call: c }, [i, j]) {  // what of the new mean gradient is old, and what is new
  const keep = c.beta1 ?? c.momentum, old = keep * c.m.num(i, j);
  const own = (1 - keep) * c.grad_scale * ofWeight(c, c.grads ?? c.grad, i, j);
  return `Of the mean gradient, ${say(old)} is of the steps before, ${say(own)} of this one.`;
}

function drawStart() {
  const { t, head } = most(), loss = losses.data[t];
  const guesses = best(probs, t, 3).map(([id, p]) => `“${word(id)}” ${percent(p)}`).join(", ");
  const before = inputs.slice(Math.max(0, t - 18), t + 1).map(word).join("");
  const cards = [make("div", { className: "card" }, words("h3", "The most surprising token"),
    make("p", {}, "After ", words("q", before), " came “", words("mark", word(targets[t])),
      `”. The model gave it ${percent(Math.exp(-loss))}; its best guesses: ${guesses}.`),
    make("p", {}, link(losses, [t], `Why is its loss ${say(loss)}?`), " · ",
      make("a", { href: `#guesses//${t}`, textContent: "What did each layer guess?" })))];
  if (head.tensor) cards.push(make("div", { className: "card" },
    words("h3", "The head that looks most strikingly, there"),
    make("div", { className: "side" }, draw(pictureOf(head.tensor, head.index[0]), 1),
      make("p", {}, `Head ${head.index[0]}${ofLayer(head.tensor.layer)}: at position `
        + `${position(t)}, it looks at ${position(head.index[2])} with ${percent(head.p)}.`)),
    link(head.tensor, head.index, "Why there?")));
  const moved = make("div", { className: "card" }, words("h3", "The weight that moves most"),
    words("p", "…"));
  const later = () => {
    const [{ tensor, index, move }] = mostMoved();
    const chain = tensor.whole ? chainOf(gradients[tensor.key], tensor.inWhole(index))
      : chainOf(tensor, index);
    moved.lastChild.replaceWith(make("p", {}, `${tensor.label(index)}${ofLayer(tensor.layer)} `
      + `moves by ${say(move)}. ${memoryOf(tensor, index)} `, link(tensor, index, "Why that far?")),
    ...(chain.length ? [make("p", {}, "From its gradient back to the loss, along the largest "
      + "terms: ", chain.slice(tensor.whole ? 0 : 1).flatMap((x, i) => [i ? " ← " : "",
      link(x.tensor, x.index)]))] : []));
    const tiles = new Set(chain.map(x => `${x.tensor.key}`));
    for (const a of document.querySelectorAll("#map a[data-number]"))
      a.classList.toggle("chain", tiles.has(tensors[a.dataset.number].key));
  };
  setTimeout(later, 50);
  return [words("h2", "From a text to a loss, and from the loss to every weight"),
    words("p", "A language model reads a text, token by token (a letter, or a piece of a word), "
      + "and at each guesses the next one. The loss says how wrong its guesses are. One training "
      + "step computes it, then how it changes with each weight, and moves all weights a little."),
    make("p", {}, make("a", { className: "button", href: "#tour//0",
      textContent: "A tour in ten stations" }), " ",
    make("a", { className: "button", href: "#training", textContent: "Training, as a film" })),
    words("p", "In the drawing of the model, the residual stream goes up: a row of numbers for "
      + "each token, to which attention and MLPs, the branches, add. Each picture is a tensor, "
      + "the numbers of one place: blue is positive, orange negative. Click one, then one of its "
      + "numbers, to see what made it, and the line of the trainer that did."),
    make("div", { className: "cards" }, cards, moved)];
}

const BACKWARD = [
  "d in front of a name means: how much the loss changes for each +1 of it. dln1[5, 3] = −0.02 "
  + "says: if ln1[5, 3] were larger by 0.01, the loss would be lower by 0.0002. So the update goes "
  + "against d: a weight whose d is negative is raised.",
  "No number reaches the loss directly: it changes the next ones, and these the loss. The chain "
  + "rule adds up all ways: dx is the sum, over everything that x went into, of how much that "
  + "changes with x, times its own d. If y = 3x and dy = 2, then dx = 3 × 2 = 6. So the backward "
  + "pass goes through the calls from the last to the first: each needs the d of its result, and "
  + "numbers that the forward pass kept.",
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
    words("p", `The loss is ${say(lossOf())}, the mean over ${list(T, shareOf).includes(0)
      ? "the answer's tokens, whose targets have a weight of 1, others 0"
      : "the positions"}. Of each: what came, `
      + "with its probability, the loss, and the likeliest tokens."),
    outcomes(Array.from(losses.data), list(T, t => best(probs, t, 3)),
      (loss, t) => link(losses, [t], say(loss)))];
}

function drawUpdate() {
  const { optimizer, step, rate, peak, norm, grad_scale: scale, grad_clip: clip } = data.update;
  return [words("h2", `Update: how far ${optimizer} moves each weight`),
    words("p", `If the model were trained on this prompt next: step ${step}. The settings are `
      + `${data.update.whose}: a learning rate of ${say(rate)} there, ${say(peak)} at its peak`
      + `${data.alive ? "; “train one step” takes the rate beside it" : ""}.`
      + (norm === null ? "" : ` The gradient's norm is ${say(norm)}`
        + (scale < 1 ? `, above ${clip}: all gradients are multiplied by ${say(scale)}.` : "."))
      + (rate > peak / 20 ? "" : ` The schedule has nearly ended: at its peak, moves were ${
        say(Math.round(peak / rate))} times as large.`)
      + (data.alive ? "" : " Of each matrix, a tile has the rows and columns with the largest "
        + "moves.")),
    words("h3", "The weights that move most, one of each tensor"),
    table(mostMoved().slice(0, 12).map(({ tensor, index, move }) =>
      [link(tensor, index), say(move), tensor.call.f, say(tensor.call.learning_rate)]),
    ["weight", "moves by", "function", "its rate"])];
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
  const t = state.position = clamp(state.given[0] ?? most().t, T - 1), layers = streams().map(lens);
  const loss = losses.data[t], logits = probs.call.logits;
  const row = list(logits.shape[1], id => logits.num(t, id) / temperature);
  const call = { shared: {} }, at = id =>
    quietly(() => softmax(call, 0, row.length, i => row[i], id, ""));
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
    table(best(probs, t, 5).map(([id, p]) =>
      [`“${word(id)}”`, link(probs, [t, id], say(p))])),
    make("p", {}, make("label", {}, `Temperature ${temperature}: `, make("input", { type: "range",
      id: "temperature", min: .1, max: 2, step: .1, value: temperature, oninput: ({ target }) => {
        temperature = +target.value;
        show();
      } })), " Logits are divided by it before the softmax, when text is drawn: ",
    best(warm, 0, 4).map(([id, p]) => `“${word(id)}” ${percent(p)}`).join(", ")),
    words("p", "How much that loss depends on each token: d of the row with which the token "
      + "begins, times the row. Positive: more of it would raise the loss."),
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

const atMost = tensor => [tensor, [most().t, 0]];
function ofHead() {  // the most striking head: its attention, and the matmul that makes its queries
  const { t, head } = most(), { tensor, index } = head.tensor ? head
    : { tensor: newest[attKeys[0]], index: [0, T - 1, 0] };
  const looks = forward.find(c => c.outs.att === tensor), name = looks.inp.name;
  const makes = forward.find(c => c.f === "matmul_forward" && c.outs.out.name === name
    && c.outs.out.layer === tensor.layer);
  return { tensor, index, looks, makes, first: [t, index[0] * attention.HS] };
}
const TOUR = [
  ["A token becomes numbers", "Each token is looked up in a table of weights: a row of numbers. "
    + "This is all the model knows of it at first.", () => atMost(forward[0].outs.out)],
  ["Each layer reads a normalized stream", "The rows go up, as the residual stream. A layer first "
    + "brings each to one size, so that it need not care how much was added before.",
  () => atMost(ofHead().makes.inp)],
  ["Query, key and value", "From each row, three are made, by weights: what the position asks for, "
    + "what it offers, and what it hands over.",
  () => [ofHead().makes.outs.out, ofHead().first]],
  ["A head decides where to look", "The query of a position is multiplied with the keys of the "
    + "positions before it and its own: the better they fit, the more it looks there.",
  () => [ofHead().tensor, ofHead().index]],
  ["It gathers what it looks at", "The values of those positions are averaged, by how much the "
    + "head looks at each.", () => [ofHead().looks.outs.out, ofHead().first]],
  ["The stream is added to", "What attention found is added: nothing is lost, and later layers can "
    + "read it.", () => {
    const { tensor: { layer } } = ofHead();
    return atMost(sums.find(c => c.outs.out.layer === layer).outs.out);
  }],
  ["The MLP looks for patterns", "Each hidden number answers to one pattern of the stream. The MLP "
    + "then adds what follows from the patterns it found.", () => atMost(sums[1].inp2)],
  ["Probabilities, and a loss", "At each position, the row at the top of the stream is compared "
    + "with every token's row of the classifier. The loss is how surprised the model is by the "
    + "token that came.",
  () => [losses, [most().t]]],
  ["The way back", "How would the loss change with each logit? It rises with every one, by its "
    + "probability, and falls with the right one: its d is negative, so it should go up. From "
    + "here, the chain rule goes back to all weights.",
  () => [gradients[probs.call.logits.key], [most().t, targets[most().t]]]],
  ["The weight that moves most", "Its gradient, and those of the steps before, say where it goes "
    + "and how far. All weights move so, and the next step begins.",
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

// ---- the page -----------------------------------------------------------------------------------

function drawPrompt() {  // the likelier a token's successor was, the bluer
  const { mode, key, index: [head] = [0] } = state;
  const where = t => mode === "attention" ? [mode, key, [head, t, 0]] : ["guesses", "", [t]];
  $("prompt").replaceChildren(...inputs.map((id, t) => make("li", {}, make("a", {
    href: at(...where(t)), textContent: word(id), ariaCurrent: t === state.position,
    title: `position ${t}; then “${word(targets[t])}” came, loss ${say(losses.data[t])}`,
    style: shade(Math.exp(-losses.data[t]), 60, "var(--card)") }))));
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
  const isChosen = location.hash.includes("/");
  if (innerWidth <= 800 && isNew && state.key && isChosen) ($("head") ?? $("detail")).scrollIntoView();
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
  usePrompt(data.ids, data.weights);
  drawAlive();
  show();
});
