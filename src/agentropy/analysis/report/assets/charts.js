// Charts as SVG, drawn at the width they have. Each is read by pointer, by the arrow keys, and as a sentence.

const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7"];

function ticks(low, high, wanted) {
  const span = high - low || 1;
  const raw = span / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}
const tickText = (v, form) => (form === "%" ? `${Number((100 * v).toPrecision(6))}` : Math.abs(v) >= 1e4 ? `${Number((v / 1e3).toPrecision(4))}k` : `${v < 0 ? MINUS : ""}${Number(Math.abs(v).toPrecision(6))}`);

/** Draw now, and again when the width changes. */
function responsive(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(node.clientWidth);
    if (now > 40 && now !== width) { width = now; draw(now); }
  }).observe(node);
  return node;
}

/**
 * A chart over training steps. spec: {title, unit, form, series: [{name, values}], stacked, floor}; values may be null.
 */
function stepChart(steps, spec) {
  const readout = el("output", { class: "readout" });
  const plot = el("div", { class: "plot", tabindex: "0", role: "img" });
  const box = el("figure", { class: "chart" }, el("figcaption", {}, el("span", { class: "name", text: spec.title }), el("span", { class: "unit", text: spec.unit })), legend(spec), plot, readout);
  const shown = spec.series.filter((s) => s.values.some((v) => v !== null));
  const totals = spec.stacked ? steps.map((_, i) => shown.reduce((sum, s) => sum + (s.values[i] || 0), 0)) : [];
  const all = spec.stacked ? totals : shown.flatMap((s) => s.values.filter((v) => v !== null));
  if (!all.length) {
    plot.replaceWith(el("p", { class: "empty", text: "No step has this number." }));
    return box;
  }
  const value = (v) => (missing(v) ? "–" : spec.form === "%" ? percent(v) : sig(v));
  const describe = (i) => `step ${steps[i]}: ` + spec.series.map((s) => (spec.series.length > 1 ? `${s.name} ` : "") + value(s.values[i])).join(" · ");
  plot.setAttribute("aria-label", `${spec.title}, ${plural(steps.length, "step")}; first ${describe(0)}; last ${describe(steps.length - 1)}`);
  let at = steps.length - 1;
  readout.textContent = describe(at);
  let low = Math.min(...all), high = Math.max(...all);
  if (spec.stacked || spec.floor === 0) low = Math.min(0, low);
  if (high === low) { high += Math.abs(high) * 0.1 || 1; if (low) low -= Math.abs(low) * 0.1; }
  const height = spec.height || 168, top = 8, bottom = 24;
  let mark = null;
  responsive(plot, (width) => {
    const yTicks = ticks(low, high, 4);
    const left = 10 + 6.6 * Math.max(...yTicks.map((v) => tickText(v, spec.form).length)), right = 10;
    const first = steps[0], last = steps[steps.length - 1];
    const bar = spec.stacked ? Math.max(1, Math.min(28, ((width - left - right) / steps.length) * 0.75)) : 0;
    const x = (s) => (last === first ? (left + width - right) / 2 : left + bar / 2 + ((s - first) / (last - first)) * (width - left - right - bar));
    const y = (v) => top + ((high - v) / (high - low)) * (height - top - bottom);
    const svg = el("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const v of yTicks) {
      svg.append(el("svg:line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }), el("svg:text", { class: "tick", x: left - 5, y: y(v) + 4, "text-anchor": "end", text: tickText(v, spec.form) }));
    }
    for (const s of ticks(first, last, Math.max(2, Math.floor(width / 70))).filter(Number.isInteger)) {
      svg.append(el("svg:text", { class: "tick", x: x(s), y: height - 7, "text-anchor": x(s) > width - 24 ? "end" : "middle", text: tickText(s) }));
    }
    if (spec.stacked) {
      steps.forEach((s, i) => {
        let base = 0;
        spec.series.forEach((line, n) => {
          const v = line.values[i] || 0;
          if (v > 0) svg.append(el("svg:rect", { class: `bar ${COLOURS[n % 7]}`, x: x(s) - bar / 2, width: bar, y: y(base + v), height: Math.max(0.5, y(base) - y(base + v)) }));
          base += v;
        });
      });
    } else {
      spec.series.forEach((line, n) => {
        let path = "", pen = false;
        line.values.forEach((v, i) => {
          if (v === null) { pen = false; return; }
          path += `${pen ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
          if (!pen && (i + 1 === steps.length || line.values[i + 1] === null)) svg.append(el("svg:circle", { class: `dot ${COLOURS[n % 7]}`, cx: x(steps[i]), cy: y(v), r: 2.5 }));
          pen = true;
        });
        svg.append(el("svg:path", { class: `line ${COLOURS[n % 7]}`, d: path }));
      });
    }
    mark = el("svg:g", { class: "mark" });
    svg.append(mark);
    plot.replaceChildren(svg);
    plot.place = (i) => {
      at = Math.max(0, Math.min(steps.length - 1, i));
      mark.replaceChildren(el("svg:line", { x1: x(steps[at]), x2: x(steps[at]), y1: top, y2: height - bottom }));
      if (!spec.stacked) spec.series.forEach((line, n) => { if (!missing(line.values[at])) mark.append(el("svg:circle", { class: `dot ${COLOURS[n % 7]}`, cx: x(steps[at]), cy: y(line.values[at]), r: 3.5 })); });
      readout.textContent = describe(at);
    };
    plot.near = (px) => steps.reduce((best, s, i) => (Math.abs(x(s) - px) < Math.abs(x(steps[best]) - px) ? i : best), 0);
  });
  const leave = () => { if (mark && document.activeElement !== plot) { mark.replaceChildren(); readout.textContent = describe(steps.length - 1); } };
  plot.addEventListener("pointermove", (e) => plot.place && plot.place(plot.near(e.clientX - plot.getBoundingClientRect().left)));
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("focus", () => plot.place && plot.place(at));
  plot.addEventListener("keydown", (e) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[e.key];
    if (to === undefined || !plot.place) return;
    e.preventDefault();
    plot.place(to);
    speak(readout.textContent);
  });
  return box;
}

function legend(spec) {
  if (spec.series.length < 2) return null;
  return el("ul", { class: "legend" }, spec.series.map((s, n) => {
    const key = el("svg:svg", { width: 22, height: 10, "aria-hidden": "true" });
    key.append(spec.stacked ? el("svg:rect", { class: `bar ${COLOURS[n % 7]}`, width: 22, height: 10 }) : el("svg:path", { class: `line ${COLOURS[n % 7]}`, d: "M0 5L22 5" }));
    return el("li", {}, key, s.name);
  }));
}

/** Histograms of dH, a row a group, on one axis. */
function histograms(data, groups) {
  const box = el("div", { class: "histograms" });
  for (const g of groups) {
    const plot = el("div", { class: "plot", role: "img", "aria-label": `${g.name}: ${plural(g.n, "call")}, mean dH ${changeOf({ ek: page.estimates }, g.mean)}, ${percent(g.effective)} effective` });
    const about = el("div", { class: "about" }, el("b", {}, el("bdi", { text: oneLine(short(g.name, 40)) })), el("span", { text: plural(g.n, "call") }), el("span", { text: `mean ${changeOf({ ek: page.estimates }, g.mean)}` }), el("span", { text: `${percent(g.effective, 0)} effective` }), g.undefined ? el("span", { class: "quiet", text: `${count(g.undefined)} undefined` }) : null);
    box.append(el("div", { class: "row" }, about, plot));
    const most = Math.max(1, ...g.counts), height = 56, bottom = 16;
    responsive(plot, (width) => {
      const svg = el("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      const x = (v) => ((v + data.edge) / (2 * data.edge)) * width;
      svg.append(el("svg:rect", { class: "effective", x: 0, y: 0, width: x(0), height: height - bottom }));
      g.counts.forEach((n, i) => {
        const size = (n / most) * (height - bottom - 4);
        const from = -data.edge + (2 * data.edge * i) / data.bins;
        if (n) svg.append(el("svg:rect", { class: `bar ${from < 0 ? "c1" : "c2"}`, x: (i / data.bins) * width + 0.5, width: width / data.bins - 1, y: height - bottom - size, height: size }, el("svg:title", { text: `${plural(n, "call")} with dH from ${signed(from)} to ${signed(from + (2 * data.edge) / data.bins)} nats` })));
      });
      svg.append(el("svg:line", { class: "axis", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }), el("svg:line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: height - bottom + 3 }));
      if (!missing(g.mean)) svg.append(el("svg:path", { class: "mean", d: `M${Math.max(4, Math.min(width - 4, x(g.mean)))} ${height - bottom}l-4 6h8z` }));
      for (const [v, anchor] of [[-data.edge, "start"], [0, "middle"], [data.edge, "end"]]) svg.append(el("svg:text", { class: "tick", x: x(v), y: height - 3, "text-anchor": anchor, text: v === 0 ? "0" : `${v < 0 ? "≤ " : "≥ "}${signed(v, v === Math.round(v) ? 0 : 2)}` }));
      plot.replaceChildren(svg);
    });
  }
  return box;
}
