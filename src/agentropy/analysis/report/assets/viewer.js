// One trajectory as a conversation, and two side by side.

const STATUS = { ok: "✓", error: "✗", timeout: "⏱", invalid: "!", lost: "?" };
const VERDICT = { true: ["right", "✓ right"], false: ["wrong", "✗ wrong"], null: ["ungraded", "– not graded"] };
const verdictOf = (t) => VERDICT[String(t.right)];

/** What a trajectory was, did and earned, in short words. */
function facts(t) {
  const q = t.question, out = [originIn(t.file)].filter(Boolean);
  if (q.kind) out.push(q.kind);
  if (!missing(q.need)) out.push(q.need === 0 ? "needs no call" : `needs ${plural(q.need, "call")}`);
  out.push(plural(t.calls.length, "call"), plural(t.tokens, "token"));
  if (t.entropy !== null) out.push(`mean entropy ${t.ek ? "≈ " : ""}${fixed(t.entropy, 3)} nats`);
  if (!missing(t.rw) && t.rw !== t.sc) out.push(`reward ${sig(t.rw)}`);
  if (t.st !== "answer") out.push(`ended by ${t.st.replace("_", " ")}`);
  if (t.bonus) out.push(`bonus on ${plural(t.bonus, "token")}`);
  if (t.pa) out.push(`forked at token ${t.fk} of ${short(t.pa, 80)}`);
  return out;
}

function fate(t) {
  if (!t.w) return null;
  const why = REASONS[t.w] || t.w;
  return el("p", { class: "fate", text: wasTrained(t.file) ? `Not learned from: ${why}.` : `${page.method} would not learn from it: ${why}.` });
}

/** A trajectory. top: the entropy at the top of the strip's scale, so that two can be compared. */
function conversation(t, top) {
  const blocks = [], parts = el("div", { class: "talk" });
  let turn = 0;
  const add = (s, kind, node, label) => { node.dataset.kind = kind; blocks.push({ s, node, label }); parts.append(node); };
  t.s.forEach((s) => {
    const kind = KINDS[s.k];
    if (kind === "prompt") add(s, kind, promptBlock(t, s), "question");
    else if (kind === "result") add(s, kind, resultBlock(t, s), `result ${turn}`);
    else {
      if (!blocks.length || !blocks[blocks.length - 1].s.t) turn += 1;
      add(s, kind, modelBlock(t, s, kind), `${kind} ${turn}`);
    }
  });
  parts.append(verdict(t));
  const [mood, word] = verdictOf(t);
  const head = el("header", {}, el("p", { class: "question" }, el("span", { class: `badge ${mood}`, text: word }), " ", textBlock(short(t.question.text || t.question.id, 1000), {})), el("p", { class: "facts-line" }, facts(t).map((f) => el("bdi", { text: oneLine(f) }))), el("p", { class: "id" }, el("bdi", { text: oneLine(t.i) })), fate(t));
  const node = el("article", { class: "trajectory", "aria-label": `Trajectory ${oneLine(t.i)}` }, head, strip(t, blocks, top), parts);
  watchTokens(node);
  return node;
}

function block(kind, title, extra, ...content) {
  return el("section", { class: `block ${kind}`, tabindex: "-1" }, el("div", { class: "who" }, el("h3", { text: title }), extra), content);
}

function promptBlock(t, s) {
  const seen = s.x && s.x.trim() !== (t.question.text || "").trim() ? el("details", {}, el("summary", { text: "as the policy saw it" }), textBlock(s.x, { class: "code" })) : null;
  return block("prompt", "Question", null, textBlock(t.question.text || s.x || "(no text was recorded)", { class: "text" }), seen);
}

function modelBlock(t, s, kind) {
  const tools = (s.c || []).map((c) => c.n || "no name").join(", ");
  const title = kind === "call" ? `Call${tools ? ` · ${short(oneLine(tools), 60)}` : ""}` : "Reasoning";
  const h = s.h && s.t.length ? el("span", { class: "mean", text: `H ${t.ek ? "≈ " : ""}${fixed(s.m, 3)}`, title: "mean entropy of this part, nats a token" }) : null;
  return block(kind, title, h, s.t.length ? tokenLine(t, s, title) : el("p", { class: "empty", text: kind === "call" ? "The source has no tokens of this call." : "no tokens" }), (s.c || []).map((c) => argumentsOf(c, !s.t.length)));
}

/** bare: the arguments are all that there is to see of the call. */
function argumentsOf(c, bare) {
  const rows = c.a.map(([name, value]) => el("div", {}, el("dt", {}, el("bdi", { text: oneLine(name) })), el("dd", {}, textBlock(value, { class: "code" }))));
  const error = c.er ? el("p", { class: "error" }, el("bdi", { text: visible(`This call could not be read: ${c.er}`) })) : null;
  const open = bare || c.a.some(([, value]) => value.includes("\n") && value.length < 2000);
  return [error, rows.length ? el("details", { open }, el("summary", { text: "arguments" }), el("dl", { class: "arguments" }, rows)) : null];
}

function resultBlock(t, s) {
  const results = (s.r || []).map((r) => {
    const effect = missing(r.d) ? "dH undefined" : r.e ? "effective" : "not effective";
    const dh = missing(r.d) ? null : el("span", { class: `dh ${r.e ? "down" : "up"}`, title: `entropy before ${sig(r.h0)}, after ${sig(r.h1)} nats a token` }, `dH ${changeOf(t, r.d)}`, el("small", { text: ` (${fixed(r.h0, 3)} → ${fixed(r.h1, 3)})` }));
    const line = el("p", { class: "outcome" }, el("span", { class: `status ${r.s}`, text: `${STATUS[r.s] || ""} ${r.s}` }), el("span", { text: milliseconds(r.ms) }), dh, el("span", { class: `effect ${r.e ? "down" : "up"}`, text: `${missing(r.d) ? "" : r.e ? "▼ " : "▲ "}${effect}` }), missing(r.w) ? null : el("span", { text: `tool's reward ${sig(r.w)}` }), r.stop ? el("span", { text: "ended the episode" }) : null);
    return [line, r.o ? textBlock(r.o, { class: "code output" }) : el("p", { class: "empty", text: "no output" })];
  });
  const seen = s.x ? el("details", {}, el("summary", { text: "as the policy saw it" }), textBlock(s.x, { class: "code" })) : null;
  return block("result", "Result", null, results.length ? results : el("p", { class: "empty", text: "no result was recorded" }), seen);
}

function verdict(t) {
  const [mood, word] = verdictOf(t), gold = t.question.gold || [];
  const row = (name, value, properties) => el("div", {}, el("dt", { text: name }), el("dd", {}, value === null ? el("span", { class: "empty", text: "none" }) : textBlock(value, properties)));
  return el("section", { class: `block verdict ${mood}` }, el("div", { class: "who" }, el("h3", { text: "Verdict" }), el("span", { class: `badge ${mood}`, text: word }), el("span", { class: "mean", text: missing(t.sc) ? "no score" : `score ${sig(t.sc)}` })), el("dl", { class: "arguments" }, row("answer", t.an ?? null), gold.length ? row(gold.length > 1 ? "accepted" : "gold", gold.join("  or  ")) : null));
}

/** A bar for each segment, as high as its mean entropy; pressing one goes there. */
function strip(t, blocks, top) {
  const nav = el("nav", { class: "strip", "aria-label": "Segments" });
  for (const { s, node, label } of blocks) {
    const r = (s.r || [])[0], bar = el("span", { class: "bar" });
    const button = el("button", { type: "button", class: KINDS[s.k], on: { click: () => { node.scrollIntoView({ block: "center" }); node.focus({ preventScroll: true }); } } }, bar);
    if (s.t) {
      button.style.flexGrow = String(Math.sqrt(s.t.length));
      bar.style.height = missing(s.m) ? "2px" : `${Math.max(2, Math.min(1, s.m / top) * 40)}px`;
      bar.classList.add(`h${shade(s.m)}`);
      button.setAttribute("aria-label", `${label}: ${plural(s.t.length, "token")}, mean entropy ${sig(s.m)}`);
      button.title = `${label}: H ${sig(s.m)}`;
    } else if (r) {
      bar.append(STATUS[r.s] || "•", el("small", { text: missing(r.d) ? "" : (t.ek ? "≈" : "") + signed(r.d) }));
      bar.classList.add(r.s);
      button.setAttribute("aria-label", `${label}: ${r.s}, dH ${changeOf(t, r.d)}`);
      button.title = `${label}: ${r.s}, dH ${changeOf(t, r.d)}`;
    } else {
      bar.textContent = s.k === 0 ? "?" : "•";
      button.setAttribute("aria-label", label);
    }
    nav.append(button);
  }
  return nav;
}
const topOf = (...ts) => Math.max(0.1, ...ts.flatMap((t) => t.s.map((s) => s.m || 0)));

/** The others of the same question, for comparing: its counterpart before or after training first. */
function companions(t) {
  const pair = { before: "after", after: "before", "before-greedy": "after-greedy", "after-greedy": "before-greedy" }[t.file.kind];
  const rank = (o) => (o.file.kind === pair ? 0 : o.f === t.f ? 1 : 2) + (o.i === t.i ? 0 : 0.5);
  return page.ofQuestion.get(t.q).filter((o) => o !== t).sort((a, b) => rank(a) - rank(b) || a.place - b.place);
}

function viewerBar(t, other) {
  const list = companions(t).slice(0, 200), at = state.shown.indexOf(t);
  const step = (label, title, to) => el("button", { type: "button", title, "aria-label": title, disabled: !to, text: label, on: { click: () => to && go(t, to) } });
  const go = (_, to) => open(to);
  const pick = el("select", { id: "companion", "aria-label": "Compare with another trajectory of this question", on: { change: () => compare(t, page.byKey.get(pick.value)) } }, el("option", { value: "", text: other ? "compare with another …" : list.length ? `compare with … (${list.length})` : "nothing to compare with" }), list.map((o) => el("option", { value: o.key, text: [originIn(o.file), verdictOf(o)[1], plural(o.calls.length, "call"), short(oneLine(o.i.split("/").slice(-2).join("/")), 40)].filter(Boolean).join(" · ") })));
  pick.disabled = !list.length;
  const shading = el("select", { id: "shading", "aria-label": "Shade tokens by", on: { change: () => { state.shading = shading.value; mode(); } } }, [["entropy", "shade: entropy"], ["surprise", "shade: surprise (−log p)"], ["advantage", "shade: advantage"]].map(([v, text]) => el("option", { value: v, text })));
  shading.value = state.shading;
  const numbers = el("button", { type: "button", id: "numbers", "aria-pressed": String(state.numbers), title: "Write entropies above 0.5 nats over their tokens (n)", text: "numbers", on: { click: () => { state.numbers = !state.numbers; numbers.setAttribute("aria-pressed", String(state.numbers)); mode(); } } });
  return el("div", { class: "bar-top" }, el("button", { type: "button", class: "back", text: "← list", on: { click: () => closeViewer() } }), step("↑", "Previous (k)", at > 0 ? state.shown[at - 1] : null), step("↓", "Next (j)", at + 1 < state.shown.length ? state.shown[at + 1] : null), pick, other ? el("button", { type: "button", text: "end comparison", on: { click: () => open(t) } }) : null, shading, numbers);
}

/** How tokens are shown, as classes of the page, so that nothing need be drawn again. */
function mode() {
  document.body.dataset.shading = state.shading;
  document.body.classList.toggle("numbers-on", state.numbers);
}

function keyToShades() {
  const limits = ["≤ 0.05", "0.05", "0.2", "0.5", "1", "2"];
  return el("p", { class: "key" }, el("span", { class: "name", text: "nats:" }), limits.map((text, i) => el("span", { class: `t h${i} s${i}`, text: i ? `> ${text}` : text })), el("span", { class: "t bonus", text: "bonus" }));
}

function viewer(t, other) {
  const top = other ? topOf(t, other) : topOf(t);
  const pair = other ? [t, other].sort((a, b) => a.file.step - b.file.step || a.place - b.place) : [t];
  const body = el("div", { class: other ? "pair" : "one" }, pair.map((one) => conversation(one, top)));
  return el("div", { class: other ? "viewer comparing" : "viewer" }, viewerBar(t, other), keyToShades(), body);
}
