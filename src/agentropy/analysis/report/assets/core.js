// Elements, numbers, texts, and the data. Text from trajectories only ever becomes text nodes.

const $ = (selector, root = document) => root.querySelector(selector);

/** Children in one row, without those that are not there. */
const kept = (children) => children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);

/** An element. Properties: class, text, on: {event: function}, data: {}; anything else is an attribute. */
function el(tag, properties, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") node.setAttribute("class", value);
    else if (key === "text") node.textContent = value;
    else if (key === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "value") node.value = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...kept(children));
  return node;
}

// Numbers. Values are rounded to four significant digits when the page is made, and never to more here than are shown.

const MINUS = "\u2212";
const missing = (x) => x === null || x === undefined || Number.isNaN(x);

/** Up to four significant digits, without exponents where they can be avoided. */
function sig(x, digits = 4) {
  if (missing(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  let text = size >= 1e-5 && size < 1e7 ? plain(Number(size.toPrecision(digits))) : size.toExponential(digits - 1).replace("e", "·10^");
  return (x < 0 ? MINUS : "") + text;
}
const plain = (x) => (x >= 1e-6 ? x.toLocaleString("en", { maximumSignificantDigits: 6, useGrouping: x >= 10000 }) : String(x));
const fixed = (x, digits) => (missing(x) ? "–" : (x < 0 ? MINUS : "") + Math.abs(x).toFixed(digits));
const signed = (x, digits = 3) => (missing(x) ? "undefined" : (x > 0 ? "+" : x < 0 ? MINUS : "") + Math.abs(x).toFixed(digits));
/** A change, with as many digits as it takes not to call it zero. */
const change = (x) => (missing(x) ? "undefined" : x === 0 || Math.abs(x) >= 0.0005 ? signed(x) : (x > 0 ? "+" : "") + sig(x, 2));
const percent = (x, digits = 1) => (missing(x) ? "–" : fixed(100 * x, digits) + " %");
const probability = (logprob) => (missing(logprob) ? "–" : plain(Number((100 * Math.exp(logprob)).toPrecision(3))) + " %");
const count = (n) => n.toLocaleString("en");
const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many || one + "s"}`;
function milliseconds(ms) {
  if (!ms) return "";
  return ms < 1 ? `${sig(ms * 1000, 2)} µs` : ms < 1000 ? `${sig(ms, 3)} ms` : `${sig(ms / 1000, 3)} s`;
}
/** A number as a column of a table writes it: a share in percent, or so many digits. */
const written = (x, form) => (form === "%" ? percent(x) : fixed(x, Number(form)));

// Texts. What cannot be seen, or would move its neighbours, is shown by a sign.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e0fff}]/gu;
function sign(c) {
  const code = c.codePointAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  if (code === 127) return "\u2421";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}
/** Text whose control characters, direction marks and halves of characters are visible; newlines and tabs stay. */
const visible = (text) => String(text).replace(/\r\n/g, "\u240d\n").replace(UNSEEN, sign);
/** The same for one line: newlines and tabs are signs too. */
const oneLine = (text) => visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥");
/** A token's text where spaces count. */
const quoted = (text) => oneLine(text).replace(/ /g, "␣");

const SHOWN = 20000;
/** A block of text, cut where it is long, that cannot turn the direction of what stands around it. */
function textBlock(text, properties) {
  const node = el("bdi", { ...properties, dir: "auto" });
  const fill = (all) => {
    node.textContent = visible(all || text.length <= SHOWN ? text : text.slice(0, SHOWN));
    if (!all && text.length > SHOWN) {
      node.append(el("button", { class: "more", type: "button", text: `Show all (${count(text.length)} characters)`, on: { click: () => fill(true) } }));
    }
  };
  fill(false);
  return node;
}
const short = (text, most = 160) => (text.length > most ? text.slice(0, most) + "…" : text);

// The data, with what is derived from it once.

const KINDS = ["prompt", "reasoning", "call", "result"];
let page = null;

async function unpack(base64) {
  const raw = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

/** Take data in: every trajectory gets its file, question, calls and sums. */
function adopt(data) {
  page = data;
  page.byKey = new Map();
  page.ofQuestion = new Map();
  page.byId = new Map(); // null where several have the id, as before and after training do
  page.trajectories.forEach((t, place) => {
    t.place = place;
    t.vocabulary = page.vocabulary;
    t.file = page.files[t.f];
    t.question = page.questions[t.q];
    const name = `${t.file.name}/${t.i}`.replace(/[\ud800-\udfff]/gu, "\ufffd"); // an address cannot hold half a character
    for (let n = 1; n === 1 || page.byKey.has(t.key); n++) t.key = n === 1 ? name : `${name}~${n}`; // ids may recur
    t.calls = t.s.flatMap((s) => s.r || []);
    const model = t.s.filter((s) => s.t);
    t.tokens = model.reduce((n, s) => n + s.t.length, 0);
    const known = model.filter((s) => s.h);
    const n = known.reduce((sum, s) => sum + s.h.length, 0);
    t.entropy = n ? known.reduce((sum, s) => sum + s.h.reduce((a, b) => a + b, 0), 0) / n : null;
    t.bonus = model.reduce((sum, s) => sum + (s.b ? s.b.length : 0), 0);
    t.reach = t.calls.reduce((most, c) => Math.max(most, Math.abs(c.d || 0)), 0);
    t.right = t.sc === null || t.sc === undefined ? null : t.sc >= 0.5;
    page.byKey.set(t.key, t);
    page.byId.set(t.i, page.byId.has(t.i) ? null : t);
    if (!page.ofQuestion.has(t.q)) page.ofQuestion.set(t.q, []);
    page.ofQuestion.get(t.q).push(t);
  });
}

/** Where a trajectory comes from, in words. */
function origin(file) {
  const names = { before: "before training", after: "after training", "before-greedy": "before, greedy", "after-greedy": "after, greedy" };
  if (file.kind === "train") return `step ${file.step}`;
  if (file.kind === "validation") return `validation at step ${file.step}`;
  return names[file.kind] || file.name;
}

/** All text of a trajectory, in lower case, for searching; made when first asked for. */
function searchable(t) {
  if (t.search === undefined) {
    const parts = [t.i, t.question.id, t.question.text, t.an || "", ...(t.question.gold || [])];
    for (const s of t.s) {
      if (s.t) parts.push(s.t.map((v) => page.vocabulary[v][1] ?? "").join(""));
      for (const r of s.r || []) parts.push(r.o);
      if (s.x && !s.r) parts.push(s.x);
    }
    t.search = parts.join("\n").toLowerCase();
  }
  return t.search;
}

const STEPS = [0.05, 0.2, 0.5, 1, 2];
/** The shade of an entropy in nats, 0 to 5. */
const shade = (h) => (missing(h) ? 0 : STEPS.filter((limit) => h > limit).length);

const REASONS = {
  "all-calls-failed": "all its calls failed",
  "not-discriminative": "its group was all right or all wrong",
  "single-survivor": "nothing of its group was left to compare with",
  "void-turn": "it has a turn without call or answer",
  truncated: "a length limit cut it off",
  lost: "a fault of the machinery spoiled it",
  "left-over": "its group was not needed: the update was full",
};
const isEvaluation = (file) => file.kind !== "train" && file.kind !== "file";
/** Where advantages and filters are what a method would have made of it. */
const wasTrained = (file) => file.kind === "train";
/** Where its trajectories come from is said of each only if they come from several places. */
const originIn = (file) => (page.files.length > 1 ? origin(file) : "");
/** A change of entropy, marked where it is an estimate. */
const changeOf = (t, d) => `${t.ek ? "≈\u202f" : ""}${change(d)}`;
