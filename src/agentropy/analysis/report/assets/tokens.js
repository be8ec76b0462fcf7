// A segment of the policy as tokens, each shaded by what it is worth looking at; pointing at one tells about it.

const decoder = new TextDecoder("utf-8", { fatal: true });

/** How a token stands in a line: blanks alone, newlines and tabs are shown by signs, half a character as its bytes. */
function tokenText(entry) {
  if (entry[1] === null) return `⟨${entry[2]}⟩`;
  const text = visible(entry[1]).replace(/\t/g, "⇥\t").replace(/\n/g, "↵\n");
  return /^ +$/.test(text) ? text.replace(/ /g, "·") : text;
}

/** The characters that a run of tokens with halves of characters makes together, or null. */
function joined(entries) {
  const bytes = entries.map((e) => e[2]).join(" ").split(" ").map((h) => parseInt(h, 16));
  try {
    return decoder.decode(Uint8Array.from(bytes));
  } catch {
    return null;
  }
}

const advantageOf = (s, n) => (s.a === undefined ? undefined : Array.isArray(s.a) ? s.a[n] : s.a);

/** The tokens of one segment. One stop of the Tab key; the arrow keys go from token to token. */
function tokenLine(t, s, label) {
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `${label}, ${plural(s.t.length, "token")}${s.h ? `, mean entropy ${sig(s.m)} nats` : ""}` });
  const bonus = new Set(s.b || []);
  const line = el("bdi", { dir: "auto" });
  const hits = found(t, s);
  box.about = (n) => about(t, s, n, bonus.has(n));
  let run = [];
  const close = () => {
    const text = run.length > 1 ? joined(run) : null;
    if (text) line.append(el("span", { class: "joined", title: "the characters that these bytes make", text: visible(text) }));
    run = [];
  };
  const fill = (from, to) => {
    for (let n = from; n < to; n++) {
      const entry = t.vocabulary[s.t[n]];
      if (entry[1] !== null && run.length) close();
      line.append(el("span", { class: classes(t, s, n, bonus.has(n), hits.has(n)), data: { n, h: s.h && s.h[n] > 0.5 ? fixed(s.h[n], 1) : "" }, text: tokenText(entry) }));
      if (entry[1] === null) run.push(entry);
    }
    if (run.length) close();
  };
  const most = 3000;
  fill(0, Math.min(most, s.t.length));
  box.append(line);
  if (s.t.length > most) {
    const more = el("button", { class: "more", type: "button", text: `Show all (${count(s.t.length)} tokens)`, on: { click: () => { more.remove(); fill(most, s.t.length); } } });
    box.append(more);
  }
  return box;
}

function classes(t, s, n, bonus, hit) {
  const h = s.h ? s.h[n] : null, l = s.l ? s.l[n] : null, a = advantageOf(s, n);
  const size = missing(a) || a === 0 ? 0 : Math.min(5, Math.ceil(Math.abs(a) * 2.5));
  return `t h${shade(h)} s${missing(l) ? 0 : shade(-l)} ${size ? (a > 0 ? "p" : "n") + size : ""}${bonus ? " bonus" : ""}${hit ? " hit" : ""}`;
}

/** The tokens of a segment that hold a part of what is searched for. */
function found(t, s) {
  const out = new Set(), wanted = state.search.trim().toLowerCase();
  if (!wanted) return out;
  const starts = [];
  let text = "";
  for (const v of s.t) { starts.push(text.length); text += (t.vocabulary[v][1] ?? "\ufffd").toLowerCase(); }
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
    starts.forEach((from, n) => { if (from < at + wanted.length && (starts[n + 1] ?? text.length) > at) out.add(n); });
  }
  return out;
}

/** What the tip says about a token: [name, value] pairs, then alternatives. */
function about(t, s, n, bonus) {
  const entry = t.vocabulary[s.t[n]], a = advantageOf(s, n), rows = [];
  if (s.h) rows.push(["entropy", `${t.ek ? "≈ " : ""}${sig(s.h[n])} nats`]);
  if (s.l) rows.push(["probability", probability(s.l[n])], ["log-probability", sig(s.l[n])]);
  if (!missing(a)) rows.push([wasTrained(t.file) ? "advantage" : "advantage (if trained on)", (a > 0 ? "+" : "") + sig(a)]);
  if (bonus) rows.push(["bonus", "entropy-guided bonus applied"]);
  rows.push(["id", entry[0] === null ? "not known" : String(entry[0])]);
  return { text: entry[1] === null ? `bytes ${entry[2]}` : quoted(entry[1]), rows, others: s.al ? s.al[n] : [] };
}

// The tip: one for the page.

const tip = { node: null, box: null, n: -1 };

function showTip(box, n) {
  const token = box.querySelector(`.t[data-n="${n}"]`);
  if (!token || !box.about) return;
  if (tip.token) tip.token.classList.remove("at");
  Object.assign(tip, { box, n, token, node: $("#tip") });
  token.classList.add("at");
  const { text, rows, others } = box.about(n);
  const list = others.length ? el("table", {}, el("caption", { text: "likeliest tokens" }), others.map(([word, l]) => el("tr", {}, el("td", {}, el("bdi", { text: quoted(short(word, 40)) })), el("td", { text: probability(l) })))) : null;
  tip.node.replaceChildren(...kept([el("p", { class: "word" }, el("bdi", { text: short(text, 120) })), el("dl", {}, rows.map(([k, v]) => el("div", {}, el("dt", { text: k }), el("dd", { text: v })))), list]));
  tip.node.hidden = false;
  const r = token.getClientRects()[0], w = tip.node.offsetWidth, h = tip.node.offsetHeight;
  tip.node.style.left = `${Math.max(6, Math.min(innerWidth - w - 6, r.left))}px`;
  tip.node.style.top = `${r.bottom + h + 8 < innerHeight ? r.bottom + 6 : Math.max(6, r.top - h - 6)}px`;
}
function hideTip() {
  if (tip.token) tip.token.classList.remove("at");
  $("#tip").hidden = true;
  Object.assign(tip, { token: null, box: null, n: -1 });
}
function speak(text) { $("#spoken").textContent = text; }

/** Pointing, touching and arrow keys over all token lines under a node. */
function watchTokens(root) {
  const of = (e) => (e.target.closest ? e.target.closest(".t") : null);
  root.addEventListener("pointerover", (e) => {
    const token = of(e);
    if (token) showTip(token.closest(".tokens"), Number(token.dataset.n));
    else if (tip.box && e.pointerType === "mouse") hideTip();
  });
  root.addEventListener("pointerleave", hideTip);
  root.addEventListener("click", (e) => { const token = of(e); if (token) showTip(token.closest(".tokens"), Number(token.dataset.n)); });
  root.addEventListener("focusout", (e) => { if (e.target === tip.box) hideTip(); });
  root.addEventListener("keydown", (e) => {
    const box = e.target.closest ? e.target.closest(".tokens") : null;
    if (!box || box !== e.target || e.ctrlKey || e.metaKey || e.altKey) return;
    const last = box.querySelectorAll(".t").length - 1, now = tip.box === box ? tip.n : -1;
    const to = { ArrowRight: now + 1, ArrowLeft: now < 0 ? last : now - 1, Home: 0, End: last }[e.key];
    if (to === undefined || last < 0) return;
    e.preventDefault();
    const n = Math.max(0, Math.min(last, to));
    box.querySelector(`.t[data-n="${n}"]`).scrollIntoView({ block: "nearest" });
    showTip(box, n);
    const { text, rows } = box.about(n);
    speak([text, ...rows.map(([k, v]) => `${k} ${v}`)].join(", "));
  });
}
