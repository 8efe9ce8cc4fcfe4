// The page polls /v1/view for the totals and for the rows in sight; the proxy
// searches and sorts. Everything that comes from the network is set as text.
"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const POLL = 2000, PATIENCE = 5000, OVERSCAN = 12, DAY = 86400, PADDING = 16;

// ---- what is known, and what is asked for
// A column: what sorts by it, its title, its classes, the widest text that it shows in full, and when it is left out where
// there is no room for all: the highest rank first, rank 0 never. Of the classes n is a figure and t a text, which may
// take two lines; w takes the room that is left. On a phone w and f have a line of their own, l has two thirds of one,
// s a third, and off is left out.
const HOST = "255.255.255.255:65535", RATE = "99.9 Mbit/s", SIZE = "99.9 MB", DELAY = "9999 ms ↑";
const columns = {
  flows: [
    ["client", "Client", "t w", HOST, 0], ["server", "Server", "t w", HOST, 0], ["listener", "Listener", "t off", "listener", 9],
    ["down", "Down", "n", RATE, 1], ["up", "Up", "n", RATE, 4], ["queue", "Queue", "n", DELAY, 2], ["window", "Window", "n", SIZE, 5],
    ["limited", "Held back by", "l", "sender idle, 100 %", 3], ["algorithm", "Algorithm", "t off", "penstock", 8], ["age", "Age", "n s", "59 min", 7],
  ],
  hosts: [
    ["name", "Host", "t w", HOST, 0], ["trouble", "How it does", "t w", "long queue: it drains at", 0], ["rate", "Rate", "n", RATE, 1],
    ["queue", "Queue", "n", DELAY, 2], ["members", "Flows", "n", "9999 of 9999", 3], ["window", "Window", "n", SIZE, 4],
    ["delivered", "Delivered", "n off", SIZE, 6], ["udp", "UDP held", "n off", "99.9 Mbit/s, echo", 8],
    ["algorithm", "Algorithm", "t off", "penstock · tracking", 7],
  ],
  peers: [
    ["name", "Peer", "t w", "somebody's phone", 0], ["listener", "Listener", "t f", "vpn (wireguard)", 8], ["", "Addresses", "t w", "255.255.255.255", 5],
    ["endpoint", "Endpoint", "t w", HOST, 4], ["handshake", "Handshake", "n", "59 min", 3], ["down", "Down", "n", RATE, 1],
    ["up", "Up", "n", RATE, 2], ["received", "Received", "n", SIZE, 6], ["sent", "Sent", "n", SIZE, 7],
  ],
  listeners: [
    ["", "Listener", "t w", "listener", 0], ["", "Mode", "t", "wireguard", 5], ["", "Open", "n", "1,000,000", 3], ["", "Accepted", "n", "10,000,000,000", 4],
    ["", "Refused", "n", "1,000,000,000", 6], ["", "Down", "n", RATE, 1], ["", "Up", "n", RATE, 2],
  ],
  events: [["", "When", "", "12:34:56 PM", 0], ["", "Level", "", "ERROR", 0], ["", "What", "w", "", 0], ["", "Times", "n", "10,000", 0]],
};
const first = { hosts: "-trouble", flows: "-rate", peers: "name" };
const wish = { tab: "hosts", sort: "-trouble", search: "", detail: 0, host: "" };
const OF_HOST = ["flows", "hosts"]; // the lists that the page of one host has
let view = null, events = [], seq = 0, history = [], span = 3600, start = 0, lost = 0, paused = false;
let timer = 0, asking = null, again = false, rowHeight = 34, answered = 0, hidden = new Set();

function fromHash() {
  const h = new URLSearchParams(location.hash.slice(1));
  const host = h.get("host") || "";
  if (host !== wish.host) history = []; // its points are others
  wish.host = host;
  wish.tab = columns[h.get("tab")] && (!host || OF_HOST.includes(h.get("tab"))) ? h.get("tab") : host ? "flows" : "hosts";
  wish.sort = h.get("sort") || first[wish.tab] || "";
  wish.search = bounded(h.get("q") || "");
}
// bounded cuts a search to what the proxy takes, which is 100 bytes.
function bounded(text) {
  while (new TextEncoder().encode(text).length > 100) text = [...text].slice(0, -1).join("");
  return text;
}
function toHash() {
  const h = new URLSearchParams(wish.host ? { host: wish.host, tab: wish.tab } : { tab: wish.tab });
  if (wish.sort && wish.sort !== first[wish.tab]) h.set("sort", wish.sort);
  if (wish.search) h.set("q", wish.search);
  window.history.replaceState(null, "", "#" + h);
}

// ---- words for figures
const unit = (v, base, names) => {
  let i = 0;
  const text = () => v >= 99.95 || i === 0 ? v.toFixed(0) : v.toFixed(1);
  while (Number(text()) >= base && i < names.length - 1) { v /= base; i++; }
  return text() + " " + names[i];
};
const rate = (v) => v === undefined ? "–" : unit(v, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]);
const bytes = (v) => v === undefined ? "–" : unit(v, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
const ms = (s) => s === undefined ? "–" : s >= 9.9995 ? s.toFixed(1) + " s" : (s * 1000).toFixed(s >= 0.09995 ? 0 : 1) + " ms";
const age = (s) => s === undefined ? "never" : s < 60 ? s.toFixed(0) + " s" : s < 3600 ? (s / 60).toFixed(0) + " min" :
  s < 86400 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " d";
const whole = (text) => text.replaceAll(" ", "\u00a0"); // on one line
const option = (value, text, selected) => {
  const o = document.createElement("option");
  o.value = value; o.textContent = text; o.selected = selected;
  return o;
};
const count = (n) => n.toLocaleString("en");
const clock = (t) => {
  const at = new Date(t * 1000), day = at.toLocaleDateString();
  return (day === new Date().toLocaleDateString() ? "" : day + " ") + at.toLocaleTimeString();
};

// ---- asking
// rows returns what is asked of the list, wherever it is scrolled to.
function rows() {
  const p = new URLSearchParams({ table: wish.tab });
  if (wish.host) p.set("host", wish.host);
  if (wish.tab in first) {
    if (wish.sort) p.set("sort", wish.sort);
    if (wish.search) p.set("q", wish.search);
  }
  return p;
}
function url() {
  const p = rows();
  p.set("events", seq);
  if (span === DAY) p.set("history", "day");
  if (history.length) p.set("since", history[history.length - 1].t);
  if (wish.detail) p.set("detail", wish.detail);
  const [from, n] = sight();
  p.set("offset", from);
  p.set("rows", n);
  return "v1/view?" + p;
}
function sight() {
  const panel = $("panel");
  const from = Math.max(0, Math.floor(panel.scrollTop / rowHeight) - OVERSCAN);
  return [from, Math.min(500, Math.ceil(panel.clientHeight / rowHeight) + 2 * OVERSCAN)];
}
async function ask() {
  if (asking) { again = true; return; }
  clearTimeout(timer);
  const tab = wish.tab, asked = span, host = wish.host, patience = new AbortController();
  asking = setTimeout(() => patience.abort(), 10000);
  let next = null, refused = "";
  try {
    const answer = await fetch(url(), { signal: patience.signal, cache: "no-store" });
    if (answer.ok) next = await answer.json();
    else refused = (await answer.text()).trim() || answer.statusText;
    if (answer.status === 400 && wish.sort !== first[tab]) { // by an address that somebody wrote
      wish.sort = first[wish.tab] || "";
      toHash();
      again = true;
    }
  } catch (e) { } // the proxy is away, or the network to it
  if (!next) {
    if (!again) markStale(refused && "refused: " + refused);
  }
  clearTimeout(asking);
  asking = null;
  if (next) {
    lost = 0;
    answered = performance.now();
    document.body.classList.remove("stale");
    if (tab === wish.tab && asked === span && host === wish.host) take(next); else again = true;
  }
  if (again) { again = false; ask(); return; }
  if (!document.hidden && !paused) timer = setTimeout(ask, Math.max(POLL, view ? view.fresh_seconds * 1000 : 0));
}
// markStale greys the figures, which are no longer the proxy's.
function markStale(why) {
  if (!lost) lost = Date.now() / 1000;
  say("bad", why || "no answer since " + clock(lost) + "; trying again");
  document.title = "Penstock";
  document.body.classList.add("stale");
}
setInterval(() => { // the proxy may hold a request without an answer
  if (view && !paused && !document.hidden && performance.now() - answered > PATIENCE + view.fresh_seconds * 1000) markStale();
}, 1000);
function take(next) {
  if (next.start !== start) { // another process: its events are not those known
    if (start && next.events === undefined) { start = next.start; seq = 0; again = true; return; }
    start = next.start;
  }
  if (history.length && next.now < history[history.length - 1].t) { // the clock was set back
    history = []; again = true;
    return;
  }
  view = next;
  if (next.events || next.events_seq === 0) events = next.events || [];
  seq = next.events_seq;
  for (const p of next.history.points) if (!history.length || p.t > history[history.length - 1].t) history.push(p);
  while (history.length && history[0].t < next.now - Math.max(span, 3600)) history.shift();
  draw();
}

// ---- drawing
function set(node, text) { if (node.textContent !== text) node.textContent = text; }
function say(kind, text) { $("state").dataset.state = kind; set($("state"), text); }
function draw() {
  const t = view.totals;
  say(view.serving ? "good" : "warn", view.state);
  set($("about"), view.version + ", up " + age(view.now - view.start) + (view.drain ? "; " + view.drain : ""));
  const h = view.host, from = h || t;
  set($("down"), rate(from.down_bits_per_second));
  set($("up"), rate(from.up_bits_per_second));
  set($("connections"), count(from.connections) + (h || !t.limit ? "" : " of " + count(t.limit)));
  set($("queue"), h ? whole(ms(h.queueing_delay_seconds)) : t.queue_p50_seconds === undefined ? "–" : whole(ms(t.queue_p50_seconds)) + " / " + whole(ms(t.queue_p95_seconds)));
  for (const e of document.querySelectorAll("[data-host]")) { // words that differ on the page of a host
    if (e.dataset.all === undefined) e.dataset.all = e.textContent;
    set(e, h ? e.dataset.host : e.dataset.all);
  }
  focus(h);
  $("csv").href = "v1/view?format=csv&" + rows();
  document.title = (document.hidden ? "" : rate(t.down_bits_per_second) + " · ") + "Penstock";
  charts();
  table();
  empty();
  news();
  detail();
  for (const id of ["gains", "fleet"]) {
    const lines = view[id] || [];
    $(id).hidden = !lines.length || Boolean(h);
    if ($(id).textContent !== lines.join("")) $(id).replaceChildren(...lines.map((text) => made("li", text)));
  }
  $("change").hidden = !view.changeable;
  const changed = view.changed || [];
  $("differs").hidden = !changed.length;
  set($("differs"), changed.length ? "Not as in the file, until it is reloaded: " + changed.join("; ") : "");
}
// made returns an element with a text.
function made(kind, text, look) {
  const e = document.createElement(kind);
  e.textContent = text;
  if (look) e.className = look;
  return e;
}
// focus shows what there is to say of one host.
function focus(h) {
  $("host").hidden = !h;
  for (const b of $("tabs").children) b.hidden = Boolean(h) && !OF_HOST.includes(b.id.slice(4));
  if (!h) return;
  set($("host-name"), h.host);
  set($("host-reason"), h.reason || (h.connections ? "has no window: rules leave it to the kernel, or little was sent yet" : "has no connection"));
  $("host-reason").className = h.severity || "";
  const udp = h.held_udp, facts = [
    ["Rules", h.rules.map((r) => r || "defaults").join(", ") || "none at present"],
    ["UDP", udp ? rate(udp.bits_per_second) + " held in " + count(udp.busy_flows) + " flows, acknowledged by " + udp.acknowledged_by : "none is held"],
    ["Gained", (h.gains || []).join("\n") || "not measured. On the proxy: penstock prove --host " + h.host + " --for 2m"],
  ];
  const key = JSON.stringify(facts);
  if ($("host-facts").dataset.key === key) return;
  $("host-facts").dataset.key = key;
  $("host-facts").replaceChildren(...facts.flatMap(([name, text]) => [made("dt", name), made("dd", text)]));
}
// niceTop returns the least of 1, 2 and 5 times a power of ten that is not below v: where an axis ends.
function niceTop(v) {
  const power = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= v * 0.999) || 10 * power;
}
const BOTTOM = 118, HEIGHT = 112;
function chart(svg, caption, name, keys, words) {
  const points = history.filter((p) => p.t >= view.now - span);
  let most = 0;
  for (const p of points) for (const k of keys) if (p[k] > most) most = p[k];
  const top = most ? niceTop(most) : 0, x = (t) => 600 - (view.now - t) / span * 600, y = (v) => BOTTOM - (top ? v / top * HEIGHT : 0);
  svg.setAttribute("aria-label", name + " of the last " + age(span) + ": " + (most ? "up to " + words(most) : "nothing yet"));
  const lines = [0, 0.5, 1].map((part) => ["line", "", { x1: 0, x2: 600, y1: BOTTOM - part * HEIGHT, y2: BOTTOM - part * HEIGHT }]);
  const curves = keys.map((key, i) => {
    let d = "", before = 0;
    for (const p of points) {
      if (p[key] === undefined) { before = 0; continue; }
      d += (before && p.t - before < 3 * view.history.step_seconds ? "L" : "M") + x(p.t).toFixed(1) + " " + y(p[key]).toFixed(1);
      before = p.t;
    }
    return ["path", "ab"[i], { d }];
  });
  const at = hover.svg === svg && points.length ? points.reduce((a, b) => Math.abs(x(a.t) - hover.x) < Math.abs(x(b.t) - hover.x) ? a : b) : null;
  if (at) lines.push(["line", "cursor", { x1: x(at.t), x2: x(at.t), y1: 0, y2: BOTTOM }]);
  svg.replaceChildren(...[...lines, ...curves].map(([tag, look, attributes]) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    if (look) e.setAttribute("class", look);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    return e;
  }));
  set(caption, at ? clock(at.t) + ": " + keys.map((k) => words(at[k])).join(" / ") : most ? "up to " + words(most) : "");
  axes(svg.parentNode, top ? ["0", words(top / 2), words(top)] : []);
}
// axes writes the figures of the vertical axis, the least first, and the times of the horizontal one.
function axes(plot, values) {
  const place = (look, text, style) => {
    const e = document.createElement("span");
    e.className = look; e.textContent = text;
    Object.assign(e.style, style);
    return e;
  };
  const times = [1, 0.5, 0].map((part) => place("x", part ? "−" + (part * span === 150 ? "2.5 min" : age(part * span).replace(".0", "")) : "now", { left: `calc(76px + (100% - 76px) * ${1 - part})` }));
  const svg = plot.firstElementChild;
  plot.replaceChildren(svg, ...values.map((text, i) => place("y", text, { top: (BOTTOM - i / 2 * HEIGHT) / 120 * svg.clientHeight - 2 + "px" })), ...times);
}
const hover = { svg: null, x: 0 };
for (const id of ["rates", "delays"]) {
  $(id).addEventListener("pointermove", (e) => {
    const box = $(id).getBoundingClientRect();
    hover.svg = $(id); hover.x = (e.clientX - box.left) / box.width * 600;
    if (view) charts();
  });
  $(id).addEventListener("pointerleave", () => { hover.svg = null; if (view) charts(); });
}
function charts() {
  chart($("rates"), $("rates-now"), "Throughput", ["down", "up"], rate);
  chart($("delays"), $("delays-now"), "Queueing delay", ["q50", "q95"], ms);
}
$("spans").addEventListener("click", (e) => {
  const chosen = Number(e.target.dataset.span);
  if (!chosen || chosen === span) return;
  if ((chosen === DAY) !== (span === DAY)) history = []; // its points are others
  span = chosen;
  for (const b of $("spans").children) b.setAttribute("aria-pressed", Number(b.dataset.span) === span);
  if (view) charts();
  ask();
});
// empty says how traffic gets here, where there is none.
function empty() {
  const none = OF_HOST.includes(wish.tab) && view.table === wish.tab && view.total === 0;
  $("empty").hidden = !none;
  $("table").hidden = none;
  if (!none) return;
  if (wish.host || view.totals.connections) {
    $("empty").replaceChildren(made("p", wish.tab === "flows" ? "This host has no connection at present." :
      "No window yet. A connection gets one once 14,600 bytes are underway, unless its rule leaves it to the kernel (algorithm: none)."));
    return;
  }
  const ways = { tproxy: "penstock rules status", redirect: "penstock rules status", wireguard: "penstock gateway peer list", masque: "", tun: "ip route", forward: "" };
  const lines = view.listeners.map((l) => {
    const p = document.createElement("p"), code = made("code", l.mode in ways ? ways[l.mode] : "curl --proxy socks5h://ADDRESS https://example.com/");
    p.append("Listener " + l.name + ", mode " + l.mode + ": " + count(l.accepted) + " connections so far" + (l.refused ? ", " + count(l.refused) + " refused (Events say why)" : "") + ". ");
    if (code.textContent) p.append(l.mode in ways ? "Is traffic led here? " : "Programs must be told to use it: ", code);
    return p;
  });
  $("empty").replaceChildren(made("p", "No connection is open."), ...lines);
}
// news counts the warnings and errors of the last ten minutes beside the tab that has them.
function news() {
  const n = events.filter((e) => e.level !== "INFO" && e.t > view.now - 600).length;
  $("tab-events").dataset.news = n || "";
}

// cells of a row: text, or [text, title]
const server = (f) => f.host || (f.server_name ? f.server_name + " " + (f.target || "") : f.target) || "–";
const hostLink = (host) => "#" + new URLSearchParams({ host });
const cells = {
  flows(f) {
    const s = f[f.main], way = f.main === "up" ? " ↑" : "";
    return [f.client + (f.peer ? " (" + f.peer + ")" : ""), server(f), f.listener, rate(f.down.bits_per_second), rate(f.up.bits_per_second),
      ms(s.queueing_delay_seconds) + (s.queueing_delay_seconds === undefined ? "" : way), s.window_bytes ? bytes(s.window_bytes) : "–",
      f.down.algorithm ? s.reason || "the kernel alone" : f.state, s.algorithm || "–", age(f.age_seconds)];
  },
  hosts(h) {
    return [h.label, h.reason, rate(h.bits_per_second), h.active ? ms(h.queueing_delay_seconds) : "–", h.active + " of " + h.members,
      h.window_bytes ? bytes(h.window_bytes) : "–", bytes(h.delivered_bytes),
      h.held_udp ? rate(h.held_udp.bits_per_second) + ", " + h.held_udp.acknowledged_by : "–", h.algorithm + (h.phase ? " · " + h.phase : "")];
  },
  peers(p) {
    return [p.name, p.listener + " (" + p.mode + ")", p.addresses.join(" "), p.endpoint || "never heard from",
      p.mode === "wireguard" ? age(p.handshake_age_seconds) : "–", rate(p.down_bits_per_second), rate(p.up_bits_per_second),
      bytes(p.received_bytes), bytes(p.sent_bytes)];
  },
  listeners(l) {
    return [l.name, l.mode, count(l.active), count(l.accepted), count(l.refused), rate(l.down_bits_per_second), rate(l.up_bits_per_second)];
  },
  events(e) { return [clock(e.t), e.level, e.text, count(e.count)]; },
};
// widths returns the room that the columns of a list need, so that no figure and no title is cut.
function widths(tab) {
  const probe = document.createElement("span");
  probe.className = "probe";
  $("panel").append(probe);
  const wide = (text, bold) => {
    probe.textContent = text;
    probe.style.fontWeight = bold ? 600 : 400;
    return Math.ceil(probe.getBoundingClientRect().width);
  };
  const all = columns[tab].map(([id, name, , sample]) => PADDING + Math.max(wide(name + (id ? " ▾" : ""), true), wide(sample, id === "queue" || id === "trouble")));
  probe.remove();
  return all;
}
// layout leaves out columns until the rest has room, and gives what is left to those that can take it. The column that
// sorts stays.
function layout() {
  const look = columns[wish.tab], heads = [...$("table").tHead.rows[0].cells], room = $("panel").clientWidth;
  const phone = matchMedia("(max-width: 760px)").matches, need = widths(wish.tab), by = wish.sort.replace("-", "");
  const rank = (i) => look[i][0] && look[i][0] === by ? 0 : look[i][4];
  const total = () => need.reduce((sum, n, i) => hidden.has(i) ? sum : sum + n, 0);
  hidden = new Set();
  const order = look.map((_, i) => i).filter((i) => rank(i) > 0).sort((a, b) => rank(b) - rank(a));
  while (!phone && total() > room && order.length) hidden.add(order.shift());
  const takers = look.map((_, i) => i).filter((i) => !hidden.has(i) && look[i][2].split(" ").includes("w"));
  const more = Math.floor((room - total()) / takers.length);
  heads.forEach((th, i) => {
    th.hidden = hidden.has(i);
    th.style.width = need[i] + (takers.includes(i) ? more : 0) + "px";
  });
}
let headed = "";
function head() {
  const key = wish.tab + wish.sort;
  if (headed === key) return;
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.sort : undefined;
  headed = key;
  const tr = document.createElement("tr");
  tr.setAttribute("role", "row");
  const options = [];
  for (const [id, name, look] of columns[wish.tab]) {
    const th = document.createElement("th");
    th.setAttribute("role", "columnheader");
    th.scope = "col";
    const figure = look.split(" ").includes("n");
    if (figure) th.className = "n";
    if (!id) th.textContent = name;
    else {
      const on = wish.sort.replace("-", "") === id, down = wish.sort[0] === "-";
      const b = document.createElement("button");
      b.textContent = name + (on ? (down ? " ▾" : " ▴") : "");
      b.dataset.sort = id;
      b.addEventListener("click", () => sortBy(on ? (down ? id : "-" + id) : figure ? "-" + id : id));
      th.setAttribute("aria-sort", on ? (down ? "descending" : "ascending") : "none");
      th.append(b);
      for (const [v, way] of [["-" + id, id === "trouble" ? "worst first" : "greatest first"], [id, id === "trouble" ? "best first" : "least first"]]) options.push(option(v, name + ", " + way, wish.sort === v));
    }
    tr.append(th);
  }
  if (wish.sort.endsWith("rate")) options.unshift(option("-rate", "Rate, greatest first", true));
  $("table").tHead.replaceChildren(tr);
  layout();
  $("sort").replaceChildren(...options);
  $("sort").parentNode.hidden = !options.length;
  $("search").parentNode.hidden = !first[wish.tab];
  if (focused) { const b = tr.querySelector(`[data-sort="${focused}"]`); if (b) b.focus(); }
}
function table() {
  head();
  const lists = { flows: view.flows, hosts: view.hosts, peers: view.peers, listeners: view.listeners, events };
  const cut = wish.tab in first;
  if (cut && view.table !== wish.tab) return;
  const rows = lists[wish.tab] || [], offset = cut ? view.offset : 0, all = cut ? view.matches : rows.length;
  const body = $("table").tBodies[0];
  $("table").className = wish.tab === "events" ? "wrap" : wish.tab;
  $("table").setAttribute("aria-rowcount", all + 1);
  const kept = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.id : "";
  const want = rows.length + (cut ? 2 : 0);
  while (body.rows.length > want) body.deleteRow(-1);
  while (body.rows.length < want) body.insertRow().setAttribute("role", "row");
  const gap = (tr, n) => {
    tr.className = "gap"; tr.removeAttribute("data-id"); tr.setAttribute("aria-hidden", "true");
    if (tr.cells.length !== 1) { tr.replaceChildren(); tr.insertCell(); }
    tr.cells[0].colSpan = columns[wish.tab].length - hidden.size; tr.cells[0].hidden = false; tr.cells[0].className = ""; tr.cells[0].removeAttribute("data-k");
    set(tr.cells[0], ""); tr.cells[0].style.height = n * rowHeight + "px";
  };
  let at = 0;
  if (cut) gap(body.rows[at++], offset);
  rows.forEach((r, i) => fill(body.rows[at++], r, offset + i));
  if (cut) gap(body.rows[at], Math.max(0, all - offset - rows.length));
  if (kept) {
    const back = [...body.rows].find((tr) => tr.dataset.id === kept), b = back && back.querySelector("button");
    if (b && b !== document.activeElement) b.focus({ preventScroll: true });
  }
  const total = cut ? view.total : all;
  set($("matches"), all === 0 ? "nothing here" : all === total ? total.toLocaleString("en") + (total === 1 ? " row" : " rows") : all.toLocaleString("en") + " of " + total.toLocaleString("en"));
  measure(body, cut ? 1 : 0);
}
function fill(tr, r, index) {
  const look = columns[wish.tab], texts = cells[wish.tab](r);
  tr.className = r.level || r.severity || "";
  tr.removeAttribute("aria-hidden");
  tr.dataset.id = String(r.id || r.name || "");
  tr.setAttribute("aria-rowindex", index + 2);
  while (tr.cells.length > texts.length) tr.deleteCell(-1);
  while (tr.cells.length < texts.length) tr.insertCell().setAttribute("role", "cell");
  texts.forEach((text, i) => {
    const td = tr.cells[i];
    td.setAttribute("role", "cell");
    if (td.colSpan !== 1) td.colSpan = 1;
    if (td.style.height) td.style.height = "";
    td.hidden = hidden.has(i);
    const classes = look[i][2].split(" ");
    const style = look[i][2] + (i === 5 && wish.tab === "flows" && r[r.main].queueing_delay_seconds > 0.25 ? " late" : "");
    const linked = i === 0 && { hosts: r.host, peers: r.name }[wish.tab];
    if (td.className !== style) td.className = style;
    td.dataset.k = classes.includes("w") ? "" : look[i][1];
    td.title = i === 0 && wish.tab === "hosts" ? r.name : text;
    const e = inside(td, i === 0 && wish.tab === "flows" ? "BUTTON" : linked ? "A" : classes.includes("t") ? "SPAN" : "");
    if (linked) e.href = hostLink(linked);
    if (e !== td) e.className = text.length > HOST.length && !text.includes(" ") ? "long" : ""; // an address of IPv6 takes two lines of these
    set(e, text);
  });
}
// inside returns what has the text of a cell: an element of that kind, or the cell.
function inside(td, kind) {
  const e = td.firstElementChild;
  if ((e ? e.tagName : "") === kind) return e || td;
  td.replaceChildren();
  if (!kind) return td;
  const made = document.createElement(kind);
  if (kind === "BUTTON") made.addEventListener("click", () => open(Number(made.closest("tr").dataset.id)));
  td.append(made);
  return made;
}
function measure(body, i) {
  const tr = body.rows[i];
  if (!tr || tr.className === "gap" || wish.tab === "events") return;
  const h = tr.getBoundingClientRect().height;
  if (h > 0 && Math.abs(h - rowHeight) > 0.5) { rowHeight = h; again = true; }
}

// ---- one flow
function open(id) { wish.detail = id; $("detail-title").textContent = "…"; $("detail-body").replaceChildren(); $("detail").showModal(); ask(); }
function detail() {
  if (!wish.detail) return;
  const f = view.detail;
  if (!f || f.id !== wish.detail) {
    if (!again) set($("detail-title"), "This flow has ended."); // else this answer is to what was asked before
    return;
  }
  set($("detail-title"), f.client + " → " + server(f));
  const lines = [["", "Down", "Up"]];
  const both = (name, of) => lines.push([name, of(f.down), of(f.up)]);
  both("Algorithm", (s) => (s.algorithm || "–") + (s.phase ? " · " + s.phase : ""));
  both("Rate", (s) => rate(s.bits_per_second));
  both("Moved", (s) => bytes(s.bytes));
  both("Queueing delay", (s) => ms(s.queueing_delay_seconds));
  both("Round trip, least", (s) => s.srtt_seconds ? ms(s.srtt_seconds) + ", " + ms(s.min_rtt_seconds) : "–");
  both("Window", (s) => s.window_bytes ? bytes(s.window_bytes) : "–");
  both("In flight", (s) => s.limited_by ? bytes(s.inflight_bytes || 0) : "–");
  both("Paced at", (s) => s.pacing_bits_per_second ? rate(s.pacing_bits_per_second) : "–");
  both("Lost", (s) => s.limited_by ? bytes(s.lost_bytes || 0) : "–");
  both("Held back by", (s) => s.reason || "the kernel alone");
  const facts = [["Host", ""], ["State", f.state], ["Listener, rule", f.listener + ", " + (f.rule || "defaults")], ["Target", f.target || "–"],
    ["Age, idle", age(f.age_seconds) + ", " + age(f.idle_seconds)]];
  const host = made("a", f.peer || f.client.replace(/:\d+$/, "").replace(/^\[|\]$/g, ""));
  host.href = hostLink(host.textContent);
  host.addEventListener("click", () => $("detail").close());
  const make = (rows) => {
    const t = document.createElement("table");
    for (const row of rows) {
      const tr = t.insertRow();
      row.forEach((text, i) => { const c = i ? tr.insertCell() : tr.appendChild(document.createElement("th")); c.textContent = text; if (!i) c.scope = "row"; });
    }
    return t;
  };
  const about = make(facts);
  about.rows[0].cells[1].replaceChildren(host);
  $("detail-body").replaceChildren(about, make(lines));
}

// ---- another algorithm, from who has the token
const TOKEN = "penstock-token";
function outcome(kind, text) { $("outcome").dataset.state = kind; set($("outcome"), text); }
async function choices() {
  const token = sessionStorage.getItem(TOKEN);
  $("token-form").hidden = Boolean(token);
  $("change-form").hidden = !token;
  if (!token) { $("token").focus(); return; }
  try {
    const answer = await fetch("v1/rules", { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const { rules, algorithms } = await answer.json(), chosen = $("rule").value;
    const words = (r) => (r.rule || "defaults") + ": " + (r.down === r.up ? r.down : r.down + " down, " + r.up + " up");
    $("rule").replaceChildren(...rules.filter((r) => !r.refuse).map((r) => option(r.rule, words(r), r.rule === chosen)));
    $("algorithms").replaceChildren(...algorithms.map((a) => option(a, a, false)));
  } catch (e) { outcome("bad", e.message); }
}
async function change() {
  outcome("", "…");
  try {
    const answer = await fetch("v1/algorithm", {
      method: "POST", headers: { "Content-Type": "application/json", Authorization: "Bearer " + sessionStorage.getItem(TOKEN) },
      body: JSON.stringify({ rule: $("rule").value, direction: $("direction").value, algorithm: $("algorithm").value.trim() }),
    });
    if (answer.status === 401) sessionStorage.removeItem(TOKEN);
    outcome(answer.ok ? "good" : "bad", answer.status === 401 ? "That was not the token." : (await answer.text()).trim());
  } catch (e) { outcome("bad", e.message); }
  await choices();
  ask();
}
$("change").addEventListener("click", () => { outcome("", ""); $("changes").showModal(); choices(); });
$("token-form").addEventListener("submit", async (e) => {
  e.preventDefault();
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  $("token").value = "";
  outcome("", "");
  await choices();
  $("rule").focus();
});
$("change-form").addEventListener("submit", (e) => { e.preventDefault(); change(); });
$("forget").addEventListener("click", () => { sessionStorage.removeItem(TOKEN); outcome("", "forgotten"); choices(); });
$("changes-close").addEventListener("click", () => $("changes").close());

// ---- what the reader does
function sortBy(s) { wish.sort = s; $("panel").scrollTop = 0; toHash(); ask(); }
function show(tab, focus) {
  if (!columns[tab]) return;
  if (!OF_HOST.includes(tab)) wish.host = "";
  wish.tab = tab; wish.sort = first[tab] || ""; wish.search = ""; $("search").value = "";
  toHash(); tabs(focus);
  $("panel").scrollTop = 0;
  $("table").tBodies[0].replaceChildren();
  if (view) { head(); if (!(tab in first)) table(); }
  ask();
}
function tabs(focus) {
  for (const b of $("tabs").children) {
    const on = b.id === "tab-" + wish.tab;
    b.setAttribute("aria-selected", on);
    b.tabIndex = on ? 0 : -1;
    if (on && focus) b.focus();
  }
  $("panel").setAttribute("aria-labelledby", "tab-" + wish.tab);
}
let typing = 0, scrolling = 0, laidOut = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { wish.search = bounded($("search").value.trim()); $("panel").scrollTop = 0; toHash(); ask(); }, 150);
});
$("sort").addEventListener("change", () => sortBy($("sort").value));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Resume" : "Pause";
  if (!paused) ask(); else clearTimeout(timer);
});
$("panel").addEventListener("scroll", () => {
  if (!(wish.tab in first) || !view) return;
  const [from, n] = sight(), have = (view[wish.tab] || []).length;
  const inside = from + OVERSCAN >= view.offset && Math.min(view.matches, from + n - OVERSCAN) <= view.offset + have;
  if (!inside && !scrolling) scrolling = setTimeout(() => { scrolling = 0; ask(); }, 60);
});
new ResizeObserver(() => { // of the window, and of the panel by a bar to scroll
  if (!view || $("panel").clientWidth === laidOut) return;
  laidOut = $("panel").clientWidth;
  layout();
  table();
}).observe($("panel"));
$("tabs").addEventListener("click", (e) => { if (e.target.id.startsWith("tab-")) show(e.target.id.slice(4)); });
$("tabs").addEventListener("keydown", (e) => {
  const all = [...$("tabs").children].filter((b) => !b.hidden), i = all.findIndex((b) => b.id === "tab-" + wish.tab);
  const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1 }[e.key];
  if (to === undefined) return;
  e.preventDefault();
  show(all[(to + all.length) % all.length].id.slice(4), true);
});
document.addEventListener("keydown", (e) => {
  if (e.key === "/" && !["INPUT", "SELECT"].includes(document.activeElement.tagName) && !document.querySelector("dialog[open]")) { e.preventDefault(); $("search").focus(); }
});
$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("close", () => { if (!$("detail").open) wish.detail = 0; }); // else another was opened since
document.addEventListener("visibilitychange", () => {
  if (document.hidden) document.title = "Penstock"; // nobody asks, and a rate would stay
  else if (!paused) ask();
});
window.addEventListener("hashchange", () => {
  fromHash();
  $("search").value = wish.search;
  tabs();
  $("panel").scrollTop = 0;
  $("detail").close();
  ask();
});
fromHash();
$("search").value = wish.search;
tabs();
ask();
})();
