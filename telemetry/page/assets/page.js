// The page polls /v1/view for the totals and for the rows in sight; the proxy
// searches and sorts. Everything that comes from the network is set as text.
"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const POLL = 2000, OVERSCAN = 12, HOUR = 3600;

// ---- what is known, and what is asked for
const columns = {
  flows: [
    ["client", "Client", "w2", 17], ["server", "Server", "w", 19], ["listener", "Listener", "off", 8], ["down", "Down ↓", "n"], ["up", "Up ↑", "n"],
    ["queue", "Queue", "n"], ["window", "Window", "n"], ["limited", "Limited by", "", 13], ["algorithm", "Algorithm", "", 9], ["age", "Age", "n", 7],
  ],
  hosts: [
    ["name", "Group", "w", 25], ["algorithm", "Algorithm", "", 15], ["members", "Flows", "n"], ["rate", "Rate", "n"], ["queue", "Queue", "n"],
    ["window", "Window", "n"], ["limited", "Limited by", ""], ["delivered", "Delivered", "n"],
  ],
  peers: [
    ["name", "Peer", ""], ["listener", "Listener", ""], ["", "Addresses", "w", 18], ["endpoint", "Endpoint", "w2", 16], ["handshake", "Handshake", "n"],
    ["down", "Down ↓", "n"], ["up", "Up ↑", "n"], ["received", "Received", "n"], ["sent", "Sent", "n"],
  ],
  listeners: [["", "Listener", ""], ["", "Mode", ""], ["", "Open", "n"], ["", "Accepted", "n"], ["", "Refused", "n"], ["", "Down ↓", "n"], ["", "Up ↑", "n"]],
  events: [["", "When", "", 11], ["", "Level", "", 8], ["", "What", "w"], ["", "Times", "n", 8]],
};
const first = { flows: "-rate", hosts: "-rate", peers: "name" };
const wish = { tab: "flows", sort: "-rate", search: "", detail: 0 };
let view = null, events = [], seq = 0, history = [], start = 0, lost = 0, paused = false;
let timer = 0, asking = null, again = false, rowHeight = 34;

function fromHash() {
  const h = new URLSearchParams(location.hash.slice(1));
  wish.tab = columns[h.get("tab")] ? h.get("tab") : "flows";
  wish.sort = h.get("sort") || first[wish.tab] || "";
  wish.search = bounded(h.get("q") || "");
}
// bounded cuts a search to what the proxy takes, which is 100 bytes.
function bounded(text) {
  while (new TextEncoder().encode(text).length > 100) text = [...text].slice(0, -1).join("");
  return text;
}
function toHash() {
  const h = new URLSearchParams({ tab: wish.tab });
  if (wish.sort && wish.sort !== first[wish.tab]) h.set("sort", wish.sort);
  if (wish.search) h.set("q", wish.search);
  window.history.replaceState(null, "", "#" + h);
}

// ---- words for figures
const unit = (v, base, names) => {
  let i = 0;
  while (v >= base && i < names.length - 1) { v /= base; i++; }
  return (v >= 100 || i === 0 ? v.toFixed(0) : v.toFixed(1)) + " " + names[i];
};
const rate = (v) => v === undefined ? "–" : unit(v, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]);
const bytes = (v) => v === undefined ? "–" : unit(v, 1000, ["B", "kB", "MB", "GB", "TB"]);
const ms = (s) => s === undefined ? "–" : (s * 1000 >= 100 ? (s * 1000).toFixed(0) : (s * 1000).toFixed(1)) + " ms";
const age = (s) => s === undefined ? "never" : s < 60 ? s.toFixed(0) + " s" : s < 3600 ? (s / 60).toFixed(0) + " min" :
  s < 86400 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " d";
const option = (value, text, selected) => {
  const o = document.createElement("option");
  o.value = value; o.textContent = text; o.selected = selected;
  return o;
};
const clock = (t) => {
  const at = new Date(t * 1000), day = at.toLocaleDateString();
  return (day === new Date().toLocaleDateString() ? "" : day + " ") + at.toLocaleTimeString();
};

// ---- asking
function url() {
  const p = new URLSearchParams({ table: wish.tab in first ? wish.tab : "peers", events: seq });
  if (wish.tab in first) {
    if (wish.sort) p.set("sort", wish.sort);
    if (wish.search) p.set("q", wish.search);
  }
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
  const tab = wish.tab, patience = new AbortController();
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
    document.title = "Penstock";
    if (!lost) lost = Date.now() / 1000;
    say("bad", refused ? "refused: " + refused : "no answer since " + clock(lost) + "; trying again");
  }
  clearTimeout(asking);
  asking = null;
  if (next) {
    lost = 0;
    if (tab === wish.tab) take(next); else again = true;
  }
  if (again) { again = false; ask(); return; }
  if (!document.hidden && !paused) timer = setTimeout(ask, Math.max(POLL, view ? view.fresh_seconds * 1000 : 0));
}
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
  while (history.length && history[0].t < next.now - HOUR) history.shift();
  draw();
}

// ---- drawing
function set(node, text) { if (node.textContent !== text) node.textContent = text; }
function say(kind, text) { $("state").dataset.state = kind; set($("state"), text); }
function draw() {
  const t = view.totals;
  say(view.serving ? "good" : "warn", view.state);
  set($("about"), view.version + ", up " + age(view.now - view.start));
  set($("down"), rate(t.down_bits_per_second));
  set($("up"), rate(t.up_bits_per_second));
  set($("connections"), t.connections.toLocaleString("en") + (t.limit ? " of " + t.limit.toLocaleString("en") : ""));
  set($("queue"), t.queue_p50_seconds === undefined ? "–" : ms(t.queue_p50_seconds) + " / " + ms(t.queue_p95_seconds));
  document.title = (document.hidden ? "" : rate(t.down_bits_per_second) + " · ") + "Penstock";
  chart($("rates"), $("rates-now"), "Throughput", ["down", "up"], rate);
  chart($("delays"), $("delays-now"), "Queueing delay", ["q50", "q95"], ms);
  table();
  detail();
  $("change").hidden = !view.changeable;
  const changed = view.changed || [];
  $("differs").hidden = !changed.length;
  set($("differs"), changed.length ? "Not as in the file, until it is reloaded: " + changed.join("; ") : "");
}
function chart(svg, caption, name, keys, words) {
  let most = 0;
  for (const p of history) for (const k of keys) if (p[k] > most) most = p[k];
  set(caption, most ? "up to " + words(most) : "");
  svg.setAttribute("aria-label", name + " of the last hour: " + (most ? "up to " + words(most) : "nothing yet"));
  while (svg.childNodes.length < 3) svg.append(document.createElementNS("http://www.w3.org/2000/svg", svg.childNodes.length ? "path" : "line"));
  const base = svg.childNodes[0];
  for (const [k, v] of [["x1", 0], ["x2", 600], ["y1", 118], ["y2", 118]]) base.setAttribute(k, v);
  keys.forEach((key, i) => {
    let d = "", before = 0;
    for (const p of history) {
      if (p[key] === undefined) { before = 0; continue; }
      const x = 600 - (view.now - p.t) / HOUR * 600, y = 118 - (most ? p[key] / most * 112 : 0);
      d += (before && p.t - before < 3 * view.history.step_seconds ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1);
      before = p.t;
    }
    const path = svg.childNodes[i + 1];
    path.setAttribute("class", "ab"[i]);
    path.setAttribute("d", d);
  });
}

// cells of a row: text, or [text, title]
const server = (f) => f.host || (f.server_name ? f.server_name + " " + (f.target || "") : f.target) || "–";
const limited = (s) => s.limited_by ? s.limited_by + " " + age(s.limited_seconds || 0) : "–";
const cells = {
  flows(f) {
    const s = f[f.main], way = f.main === "up" ? " ↑" : "";
    return [f.client + (f.peer ? " (" + f.peer + ")" : ""), server(f), f.listener, rate(f.down.bits_per_second), rate(f.up.bits_per_second),
      ms(s.queueing_delay_seconds) + (s.queueing_delay_seconds === undefined ? "" : way), s.window_bytes ? bytes(s.window_bytes) : "–",
      f.down.algorithm ? limited(s) : f.state, s.algorithm || "–", age(f.age_seconds)];
  },
  hosts(h) {
    return [h.name, h.algorithm + (h.phase ? " · " + h.phase : ""), h.active + " of " + h.members, rate(h.bits_per_second),
      ms(h.queueing_delay_seconds), h.window_bytes ? bytes(h.window_bytes) : "–", h.limited_by, bytes(h.delivered_bytes)];
  },
  peers(p) {
    return [p.name, p.listener + " (" + p.mode + ")", p.addresses.join(" "), p.endpoint || "never heard from",
      p.mode === "wireguard" ? age(p.handshake_age_seconds) : "–", rate(p.down_bits_per_second), rate(p.up_bits_per_second),
      bytes(p.received_bytes), bytes(p.sent_bytes)];
  },
  listeners(l) {
    return [l.name, l.mode, String(l.active), String(l.accepted), String(l.refused), rate(l.down_bits_per_second), rate(l.up_bits_per_second)];
  },
  events(e) { return [clock(e.t), e.level, e.text, String(e.count)]; },
};
let headed = "";
function head() {
  const key = wish.tab + wish.sort;
  if (headed === key) return;
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.sort : undefined;
  headed = key;
  const tr = document.createElement("tr");
  tr.setAttribute("role", "row");
  const options = [];
  for (const [id, name, look, width] of columns[wish.tab]) {
    const th = document.createElement("th");
    th.setAttribute("role", "columnheader");
    th.scope = "col";
    if (look === "n") th.className = "n";
    if (width) th.style.width = width + "%";
    if (!id) th.textContent = name;
    else {
      const on = wish.sort.replace("-", "") === id, down = wish.sort[0] === "-";
      const b = document.createElement("button");
      b.textContent = name + (on ? (down ? " ▾" : " ▴") : "");
      b.dataset.sort = id;
      b.addEventListener("click", () => sortBy(on ? (down ? id : "-" + id) : look === "n" ? "-" + id : id));
      th.setAttribute("aria-sort", on ? (down ? "descending" : "ascending") : "none");
      th.append(b);
      for (const [v, way] of [["-" + id, "greatest first"], [id, "least first"]]) options.push(option(v, name + ", " + way, wish.sort === v));
    }
    tr.append(th);
  }
  if (wish.sort.endsWith("rate")) options.unshift(option("-rate", "Rate, greatest first", true));
  $("table").tHead.replaceChildren(tr);
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
  $("table").className = wish.tab === "events" ? "wrap" : "";
  $("table").setAttribute("aria-rowcount", all + 1);
  const kept = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.id : "";
  const want = rows.length + (cut ? 2 : 0);
  while (body.rows.length > want) body.deleteRow(-1);
  while (body.rows.length < want) body.insertRow().setAttribute("role", "row");
  const gap = (tr, n) => {
    tr.className = "gap"; tr.removeAttribute("data-id"); tr.setAttribute("aria-hidden", "true");
    if (tr.cells.length !== 1) { tr.replaceChildren(); tr.insertCell(); }
    tr.cells[0].colSpan = columns[wish.tab].length; tr.cells[0].className = ""; tr.cells[0].removeAttribute("data-k");
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
  set($("matches"), all === 0 ? "nothing here" : all === total ? total.toLocaleString("en") + " rows" : all.toLocaleString("en") + " of " + total.toLocaleString("en"));
  measure(body, cut ? 1 : 0);
}
function fill(tr, r, index) {
  const look = columns[wish.tab], texts = cells[wish.tab](r);
  tr.className = r.level || "";
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
    const style = look[i][2] + (i === 5 && wish.tab === "flows" && r[r.main].queueing_delay_seconds > 0.25 ? " late" : "");
    if (td.className !== style) td.className = style;
    td.dataset.k = look[i][2].startsWith("w") ? "" : look[i][1].replace(/ [↓↑]/, "");
    td.title = text;
    if (i === 0 && wish.tab === "flows") {
      let b = td.firstElementChild;
      if (!b) {
        b = document.createElement("button");
        b.addEventListener("click", () => open(Number(b.closest("tr").dataset.id)));
        td.replaceChildren(b);
      }
      set(b, text);
    } else if (td.firstElementChild) td.replaceChildren(text);
    else set(td, text);
  });
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
  const lines = [["", "Down ↓", "Up ↑"]];
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
  both("Limited by, so far", limited);
  const facts = [["State", f.state], ["Listener, rule", f.listener + ", " + (f.rule || "defaults")], ["Target", f.target || "–"],
    ["Age, idle", age(f.age_seconds) + ", " + age(f.idle_seconds)]];
  const make = (rows) => {
    const t = document.createElement("table");
    for (const row of rows) {
      const tr = t.insertRow();
      row.forEach((text, i) => { const c = i ? tr.insertCell() : tr.appendChild(document.createElement("th")); c.textContent = text; if (!i) c.scope = "row"; });
    }
    return t;
  };
  $("detail-body").replaceChildren(make(facts), make(lines));
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
    const words = (r) => (r.rule || "defaults") + ": " + (r.down === r.up ? r.down : r.down + " ↓, " + r.up + " ↑");
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
let typing = 0, scrolling = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { wish.search = bounded($("search").value.trim()); $("panel").scrollTop = 0; toHash(); ask(); }, 150);
});
$("sort").addEventListener("change", () => sortBy($("sort").value));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) ask(); else clearTimeout(timer);
});
$("panel").addEventListener("scroll", () => {
  if (!(wish.tab in first) || !view) return;
  const [from, n] = sight(), have = (view[wish.tab] || []).length;
  const inside = from + OVERSCAN >= view.offset && Math.min(view.matches, from + n - OVERSCAN) <= view.offset + have;
  if (!inside && !scrolling) scrolling = setTimeout(() => { scrolling = 0; ask(); }, 60);
});
$("tabs").addEventListener("click", (e) => { if (e.target.id.startsWith("tab-")) show(e.target.id.slice(4)); });
$("tabs").addEventListener("keydown", (e) => {
  const all = [...$("tabs").children], i = all.findIndex((b) => b.id === "tab-" + wish.tab);
  const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1 }[e.key];
  if (to === undefined) return;
  e.preventDefault();
  show(all[(to + all.length) % all.length].id.slice(4), true);
});
document.addEventListener("keydown", (e) => {
  if (e.key === "/" && !["INPUT", "SELECT"].includes(document.activeElement.tagName) && !document.querySelector("dialog[open]")) { e.preventDefault(); $("search").focus(); }
});
$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("close", () => { wish.detail = 0; });
document.addEventListener("visibilitychange", () => {
  if (document.hidden) document.title = "Penstock"; // nobody asks, and a rate would stay
  else if (!paused) ask();
});
window.addEventListener("hashchange", () => { fromHash(); $("search").value = wish.search; tabs(); ask(); });
fromHash();
$("search").value = wish.search;
tabs();
ask();
})();
