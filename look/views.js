// The views, a tour through them, and what makes the page alive.

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
function mostMoved() {
  return Object.values(moves).map(tensor => {
    const { low, high } = tensor.limits, move = -low > high ? low : high;
    return { tensor, move, index: tensor.indexOf(tensor.data.indexOf(move)) };
  }).sort((a, b) => Math.abs(b.move) - Math.abs(a.move));
}

function drawStart() {
  const { t, head } = most(), loss = losses.data[t];
  const guesses = best(probs, t, 3).map(([id, p]) => `“${word(id)}” ${percent(p)}`).join(", ");
  const before = inputs.slice(Math.max(0, t - 18), t + 1).map(word).join("");
  const cards = [make("div", { className: "card" }, words("h3", "The most surprising token"),
    make("p", {}, "After ", words("q", before), " came “", words("mark", word(targets[t])),
      `”. The model gave it ${percent(Math.exp(-loss))}, and rather expected ${guesses}.`),
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
      + `moves by ${say(move)}. `, link(tensor, index, "Why that far?")),
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
  "d in front of a name means: how much the loss changes for each +1 of it. dln1[5, 3] = −0.02 "
  + "says: if ln1[5, 3] were larger by 0.01, the loss would be lower by 0.0002.",
  "No number reaches the loss directly: it changes the next ones, and these the loss. The chain "
  + "rule adds up all ways: dx is the sum, over everything that x went into, of how much that "
  + "changes with x, times its own d. So the backward pass goes through the calls from the last "
  + "to the first, and each needs only the d of its result.",
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
    outcomes(Array.from(losses.data), list(T, t => best(probs, t, 3)),
      (loss, t) => link(losses, [t], say(loss)))];
}

function drawUpdate() {
  const { optimizer, step, rate, peak, norm, grad_scale: scale, grad_clip: clip } = data.update;
  return [words("h2", `Update: how far ${optimizer} moves each weight`),
    words("p", `If the model were trained on this prompt next: step ${step}. The settings are `
      + `${data.update.whose}: a learning rate of ${say(rate)} there, ${say(peak)} at its peak.`
      + (norm === null ? "" : ` The gradient's norm is ${say(norm)}`
        + (scale < 1 ? `, above ${clip}: all gradients are multiplied by ${say(scale)}.` : "."))
      + (rate > peak / 20 ? "" : ` The schedule has nearly ended: at its peak, moves were ${
        say(Math.round(peak / rate))} times as large.`)
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

const atMost = tensor => [tensor, [most().t, 0]];
const TOUR = [
  ["A token becomes numbers", "Each token is looked up in a table of weights: a row of numbers. "
    + "This is all the model knows of it at first.", () => atMost(forward[0].outs.out)],
  ["Each layer reads a normalized stream", "The rows go up, as the residual stream. A layer first "
    + "brings each to one size, so that it need not care how much was added before.",
  () => atMost(forward.find(c => c.outs.rstd).outs.out)],
  ["Query, key and value", "From each row, three are made, by weights: what the position asks for, "
    + "what it offers, and what it hands over.",
  () => atMost(forward.find(c => c.f === "matmul_forward").outs.out)],
  ["A head decides where to look", "The query of a position is multiplied with the keys of all up "
    + "to it: the better they fit, the more it looks there.", () => {
    const { head } = most();
    return head.tensor ? [head.tensor, head.index] : [newest[attKeys[0]], [0, T - 1, 0]];
  }],
  ["It gathers what it looks at", "The values of those positions are averaged, by how much the "
    + "head looks at each.", () => atMost(attention.outs.out)],
  ["The stream is added to", "What attention found is added: nothing is lost, and later layers can "
    + "read it.", () => atMost(sums[0].outs.out)],
  ["The MLP looks for patterns", "Each hidden number answers to one pattern of the stream. The MLP "
    + "then adds what follows from the patterns it found.", () => atMost(sums[1].inp2)],
  ["Probabilities, and a loss", "The last row of the stream is compared with every token's row of "
    + "the classifier. The loss is how surprised the model is by the token that came.",
  () => [losses, [most().t]]],
  ["The way back", "Which way should each logit go? Every one down by its probability, the right "
    + "one up. From here, the chain rule goes back to all weights.",
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

// ---- alive: another prompt, another weight, steps of training -----------------------------------

const curve = [];  // losses of the steps made in the page
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
  if (!data.alive) return $("alive").replaceChildren(words("span", "This model is only to be "
    + "looked at: a smaller one, like d2, can also be changed and trained here."));
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
      if (!curve.length) curve.push(lossOf());
      train(+rate.value);
      curve.push(lossOf());
    }
    changed();
  };
  $("alive").onsubmit = event => event.preventDefault();
  $("alive").replaceChildren(...(data.typed ? [field] : []),
    button("train one step", () => steps(1), "train"), button("ten", () => steps(10), "ten"),
    make("label", {}, "rate ", rate),
    words("output", curve.length ? `loss ${curve.slice(-6).map(say).join(" → ")}` : ""));
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
