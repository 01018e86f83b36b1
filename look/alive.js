// What makes the page alive: another prompt, another weight, steps of training.

// One step of training: every weight moves, then all is computed anew.
function train(rate) {
  const updates = calls.slice().filter(c => c.outs.move), now = data.update;
  let norm = 0;
  for (const c of updates) for (const x of (c.grads ?? c.grad).data) norm += x * x;
  now.norm = Math.sqrt(norm);
  now.grad_scale = now.grad_clip && now.norm > now.grad_clip ? now.grad_clip / now.norm : 1;
  for (const c of updates) {
    c.learning_rate *= rate / now.rate;
    c.grad_scale = now.grad_scale;
  }
  now.rate = rate;
  forget(["move", "state"]);
  for (const c of updates) for (const t of Object.values(c.outs)) t.data;
  for (const c of updates) {
    const weight = (c.params ?? c.param).data;
    c.outs.move.data.forEach((move, i) => { weight[i] += move; });
    for (const name of ["m", "v"]) if (c.outs[name]) c.ins[name].numbers = c.outs[name].data;
    (c.params ?? c.param).found = null;
    if (c.step) c.step += 1;
  }
  now.step += 1;
  forget();
}

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
      curve.length = 0;
      changed();
    } });
  const { rate: now, peak } = data.update;  // at a schedule's end, nothing would move
  const rate = make("input", { id: "rate", type: "number", step: "any", min: 0, ariaLabel: "rate",
    value: $("rate")?.value ?? Number((now > peak / 20 ? now : peak).toPrecision(3)) });
  const steps = count => {
    for (let n = 0; n < count; n++) {
      if (!curve.length) curve.push(lossOf());
      train(+rate.value);
      curve.push(lossOf());
    }
    moved = null;
    changed();
  };
  $("alive").onsubmit = event => event.preventDefault();
  $("alive").replaceChildren(...(data.typed ? [field] : []),
    button("train one step", () => steps(1), "train"), button("ten", () => steps(10), "ten"),
    make("label", {}, "rate ", rate),
    words("output", curve.length ? `loss ${curve.slice(-6).map(say).join(" → ")}` : ""),
    make("a", { href: "?", textContent: "start anew" }));
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
    return by ? `${say(tensor.data[i])}, moved by ${say(by)}: the loss goes from ${
      say(moved.loss)} to ${say(lossOf())}; its gradient foretold ${say(by * moved.slope)} more`
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
