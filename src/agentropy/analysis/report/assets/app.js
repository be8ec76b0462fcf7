// Routes, keys, theme, and the live page.

const blank = () => ({ outcome: "", file: "", calls: "", why: "", kind: "", need: "", question: "" });
const state = { search: "", filter: blank(), sort: "place", shown: [], open: "", other: "", shading: "entropy", numbers: false, metric: "", by: "status", view: "", drawn: "" };

const address = (t, other) => (other ? `#c/${encodeURIComponent(t.key)}/${encodeURIComponent(other.key)}` : `#t/${encodeURIComponent(t.key)}`);

function tabs() {
  const tab = (name, href, text) => el("a", { href, "aria-current": state.view === name ? "page" : null, text });
  $("#tabs").replaceChildren(tab("overview", "#overview", "Overview"), tab("trajectories", "#trajectories", `Trajectories ${page.trajectories.length ? count(page.trajectories.length) : ""}`));
}

function heading() {
  $("#title").textContent = oneLine(page.title);
  const c = page.config;
  $("#subtitle").textContent = oneLine([c.method, c.world || c.tasks, c.seed !== undefined ? `seed ${c.seed}` : "", page.unfinished ? "unfinished" : "", `made ${page.made.slice(0, 16)}`].filter(Boolean).join(" · "));
}

function route() {
  hideTip();
  const [kind, first, second] = location.hash.slice(1).split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const t = page.byKey.get(first), other = page.byKey.get(second);
  const view = kind === "trajectories" || kind === "t" || kind === "c" ? "trajectories" : "overview";
  const fresh = state.view !== view;
  state.view = view;
  state.open = t ? t.key : "";
  state.other = kind === "c" && other ? other.key : "";
  tabs();
  if (view === "overview") {
    $("#main").replaceChildren(overview());
    if (fresh) scrollTo(0, 0);
    return;
  }
  if (fresh || !$("#list")) showList();
  else showCurrent();
  redrawViewer((kind === "t" || kind === "c") && !t ? `There is no trajectory ${short(first || "", 200)} in this page.${page.sampling ? " It may be among those that were left out." : ""}` : "");
}

function showList() {
  const main = $("#main");
  if (!$("#list")) {
    main.replaceChildren(el("div", { class: "split" }, el("aside", { "aria-label": "List of trajectories" }, el("div", { id: "bar" }), el("p", { id: "found", role: "status" }), el("ol", { id: "list" })), el("div", { id: "viewer" })));
  }
  $("#bar").replaceChildren(filterBar());
  refresh();
  showCurrent();
}

function redrawViewer(message) {
  const place = $("#viewer");
  if (!place) return;
  hideTip();
  const t = page.byKey.get(state.open), other = page.byKey.get(state.other);
  document.body.classList.toggle("reading", Boolean(t));
  document.body.classList.toggle("comparing", Boolean(other));
  if (t) {
    place.replaceChildren(viewer(t, other));
    const hit = state.search.trim() ? place.querySelector(".hit") : null;
    if (hit) hit.scrollIntoView({ block: "center" });
    else if (state.drawn !== location.hash) scrollTo(0, 0);
    state.drawn = location.hash;
  } else {
    place.replaceChildren(el("div", { class: "hint" }, el("p", { text: message || "Choose a trajectory." }), el("p", { class: "quiet", text: "j and k go through the list, / searches, ? shows all keys." })));
  }
}

function visit(hash, replace) {
  if (location.hash !== hash) history[replace ? "replaceState" : "pushState"](null, "", hash);
  route();
}
function open(t) {
  const narrow = matchMedia("(max-width: 800px)").matches;
  visit(address(t), state.open && !narrow);
}
function compare(t, other) { if (other) visit(address(t, other)); }
function closeViewer() { visit("#trajectories"); }

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  document.documentElement.dataset.theme = name;
  const button = $("#theme"), next = THEMES[(THEMES.indexOf(name) + 1) % 3];
  button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[name];
  button.setAttribute("aria-label", `Colours: ${name}. Change to ${next}.`);
  button.title = `Colours: ${name}`;
  button.onclick = () => { try { localStorage.setItem("agentropy-theme", next); } catch { /* a page from disk may not store */ } theme(next); };
}

const KEYS = [["j, k", "next, previous trajectory"], ["/", "search"], ["Esc", "close: tip, comparison, trajectory"], ["c", "compare with another trajectory of the question"], ["n", "numbers over uncertain tokens"], ["← →", "in tokens and curves: one further"], ["Tab", "to the next part"], ["o, t", "overview, trajectories"], ["?", "this list"]];
function help() {
  let box = $("#keys");
  if (!box) {
    box = el("dialog", { id: "keys", "aria-labelledby": "keys-h" }, el("h2", { id: "keys-h", text: "Keys" }), el("dl", {}, KEYS.map(([k, v]) => el("div", {}, el("dt", {}, el("kbd", { text: k })), el("dd", { text: v })))), el("form", { method: "dialog" }, el("button", { text: "close" })));
    document.body.append(box);
  }
  box.showModal();
}

function move(by) {
  if (state.view !== "trajectories") return visit("#trajectories");
  const at = state.shown.findIndex((t) => t.key === state.open), to = state.shown[at < 0 ? 0 : at + by];
  if (to) open(to);
}

function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || !page) return;
  const typing = e.target.matches && e.target.matches("input, textarea, select");
  if (e.key === "Escape") {
    if ($("#keys") && $("#keys").open) return;
    if (!$("#tip").hidden) hideTip();
    else if (typing && e.target.id === "search") { if (state.search) { e.preventDefault(); state.search = e.target.value = ""; refresh(); redrawViewer(); } e.target.blur(); }
    else if (state.other) open(page.byKey.get(state.open));
    else if (state.open) closeViewer();
    return;
  }
  if (typing) return;
  const run = { j: () => move(1), k: () => move(-1), "?": help, o: () => visit("#overview"), t: () => visit("#trajectories"), n: () => $("#numbers") && $("#numbers").click(), c: () => $("#companion") && $("#companion").focus(), "/": () => { if (state.view !== "trajectories") visit("#trajectories"); requestAnimationFrame(() => setTimeout(() => $("#search") && $("#search").focus(), 0)); } }[e.key];
  if (!run) return;
  e.preventDefault();
  run();
}

// The live page asks the server that it came from, every two seconds, whether there is more.

async function watch() {
  let have = "";
  for (;;) {
    try {
      const answer = await fetch(`/data?have=${encodeURIComponent(have)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const data = await answer.json();
        have = data.stamp;
        if (data.waiting) $("#main").replaceChildren(el("p", { class: "waiting", role: "status", text: data.waiting }));
        else renew(data);
      } else if (answer.status !== 204) throw new Error(String(answer.status));
      live(true);
    } catch {
      live(false);
    }
    await new Promise((go) => setTimeout(go, 2000));
  }
}

function live(well) {
  const steps = page ? page.curves.steps : [], word = page && !page.unfinished ? "complete" : "live";
  const text = !well ? "the server is gone" : page && steps.length ? `${word} · step ${steps[steps.length - 1]}` : word;
  const node = $("#live");
  if (node.textContent !== text) node.textContent = text;
  node.className = well ? "on" : "off";
}

/** New data, and the same view of it: what is read stays where it is. */
function renew(data) {
  const first = !page, at = scrollY;
  adopt(data);
  heading();
  if (first) return route();
  tabs();
  const busy = document.activeElement && document.activeElement.closest("#main") ? document.activeElement : null;
  if (state.view === "overview") {
    if (busy && busy.matches(".plot, select")) return; // someone is reading it; the next change draws it
    $("#main").replaceChildren(overview());
    scrollTo(0, at);
  } else {
    const from = $("#list").scrollTop;
    if (busy && busy.closest("#bar")) refresh();
    else showList();
    $("#list").scrollTop = from;
    if (!page.byKey.has(state.open)) redrawViewer();
  }
}

async function begin() {
  let saved = null;
  try { saved = localStorage.getItem("agentropy-theme"); } catch { /* a page from disk may not store */ }
  theme(THEMES.includes(saved) ? saved : "auto");
  mode();
  $("#help").addEventListener("click", help);
  addEventListener("keydown", keys);
  addEventListener("scroll", () => { if (tip.box && !tip.box.matches(":focus")) hideTip(); }, { passive: true });
  const packed = $("#data").textContent;
  if (packed) {
    adopt(await unpack(packed));
    $("#data").remove();
    heading();
    route();
  } else {
    watch();
  }
  addEventListener("hashchange", () => page && route());
}
begin().catch((error) => $("#main").replaceChildren(el("p", { class: "waiting", role: "alert", text: `This page cannot be read: ${error.message}` })));
