// The overview: what ran, what came out, curves, filters, distributions.

const CHARTS = [
  { title: "Accuracy", unit: "mean score of sampled trajectories, %", form: "%", series: [["reward/accuracy", "training"], ["validation/avg", "validation"]] },
  { title: "Effective calls", unit: "share of calls with dH < 0, %", form: "%", series: [["tool/effective_ratio", "effective"]] },
  { title: "Entropy", unit: "nats a token", series: [["entropy/model", "all of the policy's tokens"], ["entropy/post_tool", "after a successful call"]] },
  { title: "Calls", unit: "executed calls a trajectory", floor: 0, series: [["tool/calls_per_question", "calls"]] },
  { title: "Valid calls", unit: "share of calls with status ok, %", form: "%", series: [["tool/valid_rate", "valid"]] },
  { title: "Gradient norm", unit: "before clipping", floor: 0, series: [["optim/grad_norm", "mean of the step"], ["optim/grad_norm_max", "largest of the step"]] },
];
const FILTERS = [
  ["filter/kept", "learned from, or left over"],
  ["filter/not_discriminative", "group all right or all wrong"],
  ["filter/all_calls_failed", "all calls failed"],
  ["filter/single_survivor", "nothing to compare with"],
  ["filter/void_turn", "void turn"],
  ["filter/truncated", "truncated"],
  ["filter/lost", "lost"],
];
/** Columns of other tables that hold text, even where it looks like a number. */
const TEXTS = new Set(["source", "trajectory", "call", "tool", "arguments", "status", "result"]);
const section = (id, title, ...content) => el("section", { "aria-labelledby": `${id}-h`, id }, el("h2", { id: `${id}-h`, text: title }), content);

function overview() {
  const main = el("div", { class: "overview" });
  for (const note of [page.sampling, ...page.notes].filter(Boolean)) main.append(el("p", { class: "note", role: "note" }, el("bdi", { text: visible(note) })));
  const started = page.curves.steps.length || page.trajectories.length || page.outcome.length;
  if (!started && !page.tables.length) main.append(el("p", { class: "empty", text: "Nothing has come out yet: no step is over, and there are no trajectories." }));
  if (Object.keys(page.config).length || page.files.length) main.append(whatRan());
  if (page.outcome.length) main.append(outcome());
  for (const table of page.tables) main.append(otherTable(table));
  if (page.curves.steps.length) main.append(learningCurves(), filters());
  if (page.distributions) main.append(changes());
  return main;
}

function outcome() {
  const rows = page.outcome.map((r) => {
    const difference = missing(r.before) || missing(r.after) ? null : r.after - r.before;
    const digits = r.form === "%" ? 1 : Number(r.form), scale = r.form === "%" ? 100 : 1;
    const interval = r.interval ? el("span", { class: "quiet", text: ` [${signed(100 * r.interval[1], 1)}, ${signed(100 * r.interval[2], 1)}]` }) : null;
    return el("tr", {}, el("th", { scope: "row", text: r.label, title: r.name }), el("td", { text: written(r.before, r.form) }), el("td", { text: written(r.after, r.form) }), el("td", {}, difference === null ? "–" : signed(difference * scale, digits), interval));
  });
  const table = el("table", { class: "numbers" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen", text: "number" })), el("th", { scope: "col", text: "before" }), el("th", { scope: "col", text: "after" }), el("th", { scope: "col", text: "change" }))), el("tbody", {}, rows));
  const note = page.outcome.some((r) => r.interval) ? el("p", { class: "quiet", text: "Changes of shares are in points. In brackets: 95 % interval by a bootstrap over the questions that both evaluations asked." }) : null;
  return section("outcome", "What came out", el("div", { class: "wide" }, table), note);
}

function whatRan() {
  const c = page.config, e = page.environment, facts = [];
  const fact = (name, value) => { if (value !== undefined && value !== null && value !== "") facts.push(el("div", {}, el("dt", { text: name }), el("dd", {}, el("bdi", { text: oneLine(String(value)) })))); };
  if (c.method) fact("method", c.method);
  else if (page.trajectories.length) fact("advantages and filters", `those of ${page.method}`);
  fact("questions", c.world || c.tasks);
  fact("model", c.model || (c.method ? "embedded agent" : undefined));
  fact("seed", c.seed);
  if (c.steps !== undefined) fact("steps", `${page.curves.steps.length ? page.curves.steps[page.curves.steps.length - 1] : 0} of ${c.steps}${page.unfinished ? ", unfinished" : ""}`);
  if (c.rollout) fact("a step", `${c.rollout.questions} questions × ${c.rollout.samples} samples`);
  if (c.optim) fact("learning rate", c.optim.lr);
  const total = page.curves.columns["time/total_tokens"], seconds = page.curves.columns["time/step"];
  if (total) fact("policy's tokens", count(total[total.length - 1] || 0));
  if (seconds) fact("time in steps", milliseconds(1000 * seconds.reduce((a, b) => a + (b || 0), 0)));
  fact("trajectories", count(page.files.reduce((n, f) => n + f.total, 0)));
  fact("started", e.started && String(e.started).replace("T", " ").slice(0, 16));
  fact("agentropy", e.agentropy && e.agentropy + (e.commit ? ` · ${String(e.commit).slice(0, 12)}${String(e.commit).endsWith("+changes") ? "+changes" : ""}` : ""));
  const more = [];
  const details = (title, value) => more.push(el("details", {}, el("summary", { text: title }), textBlock(JSON.stringify(value, null, 2), { class: "code" })));
  if (Object.keys(c).length) details("Configuration", c);
  if (Object.keys(e).length) details("Versions and command", e);
  return section("ran", "What ran", el("dl", { class: "facts" }, facts), more);
}

function otherTable(table) {
  const from = table.columns.indexOf("source"), numeric = (v) => v === null || typeof v === "number" || /^≈?\s?[+−]?\d[\d.,]*\s?%?$/.test(v);
  const right = table.columns.map((c, i) => !TEXTS.has(c) && table.rows.some((r) => r[i] !== null) && table.rows.every((r) => numeric(r[i])));
  const trajectory = (v, row) => page.byId.get(v) || (from < 0 ? null : page.byKey.get(`${String(row[from]).split("/").pop()}/${v}`));
  const words = (v, row) => {
    const node = el("bdi", { text: v === null ? "–" : typeof v === "number" ? (Number.isInteger(v) ? count(v) : sig(v)) : oneLine(short(v, 400)) });
    const t = typeof v === "string" ? trajectory(v, row) : null; // a cell that names a trajectory of this page leads to it
    return t ? el("a", { href: address(t), class: v.length <= 40 ? "whole" : null }, node) : node;
  };
  const cell = (v, i, row) => el(i ? "td" : "th", { class: right[i] ? "number" : "words", scope: i ? null : "row" }, words(v, row));
  const head = el("thead", {}, el("tr", {}, table.columns.map((c, i) => el("th", { scope: "col", class: right[i] ? null : "words", text: c }))));
  const body = el("tbody", {}, table.rows.map((r) => el("tr", {}, r.map((v, i) => cell(v, i, r)))));
  const id = `table-${table.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  return section(id, table.title, table.note ? el("p", { class: "quiet" }, el("bdi", { text: table.note })) : null, el("div", { class: "wide" }, el("table", { class: "numbers" }, head, body)));
}

function learningCurves() {
  const { steps, columns } = page.curves;
  const known = (name) => columns[name] && columns[name].some((v) => v !== null);
  const specs = CHARTS.map((c) => ({ ...c, series: c.series.filter(([name]) => known(name)).map(([name, label]) => ({ name: label, values: columns[name] })) })).filter((c) => c.series.length);
  const names = Object.keys(columns).filter(known);
  const chosen = el("div", {});
  const pick = el("select", { id: "metric", on: { change: () => { state.metric = pick.value; draw(); } } }, names.map((n) => el("option", { value: n, text: n })));
  const draw = () => chosen.replaceChildren(stepChart(steps, { title: pick.value, unit: "docs/metrics.md says what each number means", height: 240, series: [{ name: pick.value, values: columns[pick.value] }] }));
  pick.value = names.includes(state.metric) ? state.metric : names.includes("reward/mean") ? "reward/mean" : names[0];
  if (names.length) draw();
  return section("curves", "Learning curves", el("p", { class: "quiet", text: "Over training steps. Point at a curve, or move with the arrow keys, to read it." }), el("div", { class: "charts" }, specs.map((s) => stepChart(steps, s))), names.length ? el("div", { class: "any" }, el("label", { for: "metric", text: "Any number: " }), pick, chosen) : null);
}

function filters() {
  const { steps, columns } = page.curves;
  const series = FILTERS.filter(([name]) => columns[name] && columns[name].some((v) => v)).map(([name, label]) => ({ name: label, values: columns[name] }));
  if (!series.length) return section("filters", "Filters", el("p", { class: "empty", text: "No step counted what its filters removed." }));
  const sum = (name) => (columns[name] || []).reduce((a, b) => a + (b || 0), 0);
  const all = FILTERS.reduce((n, [name]) => n + sum(name), 0);
  return section("filters", "Filters", el("p", { class: "quiet", text: `Of ${count(all)} trajectories drawn, ${count(sum("filter/kept"))} (${percent(sum("filter/kept") / all)}) passed every filter.` }), stepChart(steps, { title: "Trajectories by what became of them", unit: "trajectories a step", stacked: true, height: 220, series }));
}

function changes() {
  const data = page.distributions;
  const labels = { status: "status", outcome: "outcome", tool: "tool", position: "position", phase: "phase of the run" };
  const shown = el("div", {});
  const choices = Object.keys(data.by).map((d) => el("button", { type: "button", "aria-pressed": "false", data: { by: d }, text: labels[d], on: { click: () => show(d) } }));
  const show = (d) => {
    state.by = d;
    choices.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.by === d)));
    shown.replaceChildren(histograms(data, data.by[d]));
  };
  show(data.by[state.by] ? state.by : Object.keys(data.by)[0]);
  return section("changes", "What calls did to the entropy", el("p", { class: "quiet", text: "dH is the entropy of the reasoning after a call minus that before it, in nats a token. Left of 0 (shaded) a call was effective: it reduced uncertainty. The triangle is the mean." }), histograms(data, [data.all]), el("div", { class: "choice", role: "group", "aria-label": "Group calls by" }, el("span", { text: "by " }), choices), shown);
}
