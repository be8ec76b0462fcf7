// The list of trajectories: filters, sorting, search.

const OUTCOMES = [["", "right or wrong"], ["right", "right only"], ["wrong", "wrong only"], ["ungraded", "not graded"]];
const CALLS = [["", "any calls"], ["none", "no call"], ["some", "with calls"], ["failed", "all calls failed"], ["trouble", "some call failed"], ["effective", "an effective call"], ["idle", "no call effective"], ["repeated", "a call repeated"]];
const SORTS = [["place", "in order"], ["calls", "most calls"], ["reach", "largest |dH|"], ["down", "dH, most reducing"], ["up", "dH, most raising"], ["entropy", "highest entropy"], ["tokens", "most tokens"], ["low", "lowest score"], ["high", "highest score"], ["step", "latest step"]];
const PAGE = 100;

const repeated = (t) => {
  const all = t.s.flatMap((s) => (s.c || []).map((c) => JSON.stringify([c.n, c.a])));
  return new Set(all).size < all.length;
};
const least = (t) => t.calls.reduce((m, c) => (missing(c.d) ? m : Math.min(m, c.d)), Infinity);
const most = (t) => t.calls.reduce((m, c) => (missing(c.d) ? m : Math.max(m, c.d)), -Infinity);

function matches(t) {
  const f = state.filter;
  if (f.outcome && (f.outcome === "ungraded" ? t.right !== null : t.right !== (f.outcome === "right"))) return false;
  if (f.file && (f.file.startsWith("kind:") ? t.file.kind !== f.file.slice(5) : t.file.name !== f.file)) return false;
  if (f.why && (f.why === "kept" ? t.w : f.why === "dropped" ? !t.w || t.w === "left-over" : t.w !== f.why)) return false;
  if (f.kind && t.question.kind !== f.kind) return false;
  if (f.need !== "" && String(t.question.need) !== f.need) return false;
  if (f.question !== "" && t.q !== Number(f.question)) return false;
  const failed = t.calls.filter((c) => c.s !== "ok").length, reducing = t.calls.filter((c) => c.e).length, n = t.calls.length;
  const fits = { none: !n, some: n, failed: n && failed === n, trouble: failed, effective: reducing, idle: n && !reducing, repeated: f.calls === "repeated" && repeated(t) };
  if (f.calls && !fits[f.calls]) return false;
  const wanted = state.search.trim().toLowerCase();
  return !wanted || searchable(t).includes(wanted);
}

function sorted(rows) {
  const by = {
    calls: (a, b) => b.calls.length - a.calls.length,
    reach: (a, b) => b.reach - a.reach,
    down: (a, b) => least(a) - least(b),
    up: (a, b) => most(b) - most(a),
    entropy: (a, b) => (b.entropy ?? -1) - (a.entropy ?? -1),
    tokens: (a, b) => b.tokens - a.tokens,
    low: (a, b) => (a.sc ?? 2) - (b.sc ?? 2),
    high: (a, b) => (b.sc ?? -1) - (a.sc ?? -1),
    step: (a, b) => b.file.step - a.file.step,
  }[state.sort];
  return by ? rows.sort((a, b) => by(a, b) || a.place - b.place) : rows;
}

function select(id, label, options, value, change) {
  const node = el("select", { id, "aria-label": label, on: { change: () => change(node.value) } }, options.map(([v, text]) => el("option", { value: v, text })));
  node.value = options.some(([v]) => v === value) ? value : options[0][0];
  return node;
}

const distinct = (values) => [...new Set(values)].sort((a, b) => (a > b ? 1 : a < b ? -1 : 0));

function filterBar() {
  const set = (name) => (value) => { state.filter[name] = value; refresh(); };
  const kinds = distinct(page.files.map((f) => f.kind)), shown = page.files.filter((f) => f.shown);
  const files = [["", "all sources"], ...(kinds.includes("train") ? [["kind:train", "training steps"]] : []), ...(kinds.includes("validation") ? [["kind:validation", "validations"]] : []), ...shown.map((f) => [f.name, origin(f)])];
  const whys = distinct(page.trajectories.map((t) => t.w).filter(Boolean));
  const reasons = [["", "kept or dropped"], ["kept", "kept"], ...(whys.some((w) => w !== "left-over") ? [["dropped", "dropped by any filter"]] : []), ...whys.map((w) => [w, w === "left-over" ? "left over" : `dropped: ${w.replace(/-/g, " ")}`])];
  const questionKinds = distinct(page.questions.map((q) => q.kind).filter(Boolean)), needs = distinct(page.questions.map((q) => q.need).filter((n) => !missing(n)));
  const search = el("input", { id: "search", type: "search", placeholder: "Search text  ( / )", "aria-label": "Search in all text", autocomplete: "off", spellcheck: "false", value: state.search });
  let wait = 0;
  search.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(() => { state.search = search.value; refresh(); redrawViewer(); }, 150); });
  const many = (options) => options.length > 2;
  return el("form", { class: "filters", role: "search", on: { submit: (e) => e.preventDefault() } },
    search,
    select("f-outcome", "Outcome", OUTCOMES, state.filter.outcome, set("outcome")),
    many(files) ? select("f-file", "Source", files, state.filter.file, set("file")) : null,
    select("f-calls", "Calls", CALLS, state.filter.calls, set("calls")),
    whys.length ? select("f-why", "Filters", reasons, state.filter.why, set("why")) : null,
    questionKinds.length > 1 ? select("f-kind", "Kind of question", [["", "all kinds"], ...questionKinds.map((k) => [k, short(oneLine(k), 40)])], state.filter.kind, set("kind")) : null,
    needs.length > 1 ? select("f-need", "Calls that the question needs", [["", "any need"], ...needs.map((n) => [String(n), n === 0 ? "needs no call" : `needs ${plural(n, "call")}`])], state.filter.need, set("need")) : null,
    select("f-sort", "Sort", SORTS, state.sort, (value) => { state.sort = value; refresh(); }),
    el("button", { type: "button", id: "clear", text: "clear", on: { click: () => { Object.keys(state.filter).forEach((k) => { state.filter[k] = ""; }); state.search = ""; state.sort = "place"; showList(); redrawViewer(); } } }));
}

function listRow(t) {
  const [mood, word] = verdictOf(t), changes = t.calls.filter((c) => !missing(c.d));
  const marks = el("span", { class: "calls", "aria-hidden": "true" }, t.calls.slice(0, 12).map((c) => el("span", { class: `call-mark ${c.s} ${c.e ? "down" : ""}`, text: c.s === "ok" ? (c.e ? "▼" : missing(c.d) ? "•" : "▲") : STATUS[c.s] })));
  const dh = changes.length ? `dH ${changeOf(t, changes.reduce((a, c) => (Math.abs(c.d) > Math.abs(a.d) ? c : a)).d)}` : "";
  const small = [originIn(t.file), t.calls.length ? plural(t.calls.length, "call") : "no call", dh, t.w && !isEvaluation(t.file) ? (t.w === "left-over" ? "left over" : "dropped") : ""].filter(Boolean).join(" · ");
  const link = el("a", { href: address(t), class: "row", "aria-current": t.key === state.open ? "true" : null, data: { key: t.key }, on: { click: (e) => { if (e.metaKey || e.ctrlKey || e.shiftKey) return; e.preventDefault(); open(t); } } }, el("span", { class: `badge ${mood}`, text: word.slice(0, 1), title: word }), el("span", { class: "what" }, el("bdi", { dir: "auto", text: oneLine(short(t.question.text || t.question.id, 140)) }), el("small", {}, el("span", { text: small }), marks)));
  return el("li", {}, link);
}

/** Filter, sort and draw the list again; the first page of it at once, more on demand. */
function refresh() {
  state.shown = sorted(page.trajectories.filter(matches));
  const list = $("#list"), head = $("#found");
  if (!list) return;
  const right = state.shown.filter((t) => t.right !== null), good = right.filter((t) => t.right).length;
  head.textContent = `${count(state.shown.length)} of ${plural(page.trajectories.length, "trajectory", "trajectories")}${right.length ? ` · ${percent(good / right.length)} right` : ""}`;
  let drawn = 0;
  const more = el("button", { type: "button", class: "more", on: { click: () => extend(drawn + PAGE) } });
  const extend = (to) => {
    list.append(...state.shown.slice(drawn, to).map(listRow));
    drawn = Math.min(to, state.shown.length);
    more.remove();
    if (drawn < state.shown.length) {
      more.textContent = `Show more (${count(state.shown.length - drawn)})`;
      list.append(el("li", {}, more));
    }
  };
  list.replaceChildren();
  list.extend = extend;
  const at = state.shown.findIndex((t) => t.key === state.open);
  extend(Math.max(PAGE, at + 10));
  if (!state.shown.length) list.append(el("li", { class: "empty", text: page.trajectories.length ? "No trajectory fits these filters." : "There are no trajectories yet." }));
}

function showCurrent() {
  const list = $("#list");
  if (!list) return;
  list.querySelectorAll("a[aria-current]").forEach((a) => a.removeAttribute("aria-current"));
  const at = state.shown.findIndex((t) => t.key === state.open);
  if (at >= 0 && list.querySelectorAll("a.row").length <= at) list.extend(at + PAGE);
  const link = at >= 0 ? list.querySelectorAll("a.row")[at] : null;
  if (link) {
    link.setAttribute("aria-current", "true");
    link.scrollIntoView({ block: "nearest" });
  }
}
