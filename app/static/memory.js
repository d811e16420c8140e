// The memory page: the trace as it grows, the ledger, and what failed.

import { SEGMENTS, TraceModel, segmentOf, tagMatcher } from "./trace_model.js";

const MIB = 1 << 20;
const ROWS = 400;
const model = new TraceModel();
const at = (id) => document.getElementById(id);
const mib = (bytes) => (bytes / MIB).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const gib = (bytes) => (bytes === null ? "unknown" : `${(bytes / MIB / 1024).toFixed(2)} GiB`);
const inMib = (bytes) => (bytes === null ? null : bytes / MIB);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const base = location.pathname.replace(/\/ui\/?$/, "");
const root = base.replace(/\/debug\/alloc$/, "");

let dirty = false;
let following = true;
const records = new Map();

function change() {
  if (dirty) return;
  dirty = true;
  setTimeout(() => requestAnimationFrame(draw), 200);
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function row(cells, kind) {
  const made = element("tr");
  if (kind) made.className = kind;
  made.append(...cells.map((text) => element("td", text)));
  return made;
}

// -- the trace -------------------------------------------------------------------------------------------------------

function connect() {
  const source = new EventSource(`${base}?last=65536`);
  source.onopen = () => (at("connection").textContent = "following");
  source.onerror = () => {
    at("connection").textContent = source.readyState === EventSource.CLOSED ? "off" : "connecting again";
    // A refusal is final for an EventSource: tracing may be off, or the server is gone.
    if (source.readyState === EventSource.CLOSED) explainRefusal();
  };
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.addEventListener("gap", (event) => take(JSON.parse(event.data)));
  source.addEventListener("engine", () => {
    model.clear();
    refresh();
    change();
  });
}

function take(record) {
  model.add(record);
  if (record.kind === "failed") refresh();
  change();
}

async function explainRefusal() {
  try {
    const answer = await fetch(`${base}?last=0`);
    if (answer.ok) return void setTimeout(connect, 1000);
    at("connection").textContent = (await answer.json()).error.message;
    if (answer.status >= 500) setTimeout(connect, 2000);
  } catch {
    at("connection").textContent = "the server does not answer";
    setTimeout(connect, 2000);
  }
}

// -- drawing ---------------------------------------------------------------------------------------------------------

function draw() {
  dirty = false;
  const slider = at("instant");
  slider.max = Math.max(model.records.length - 1, 0);
  if (following) slider.value = slider.max;
  const last = model.records.findLast((record) => record.kind === "alloc" || record.kind === "free");
  if (last) {
    at("live").textContent = gib(last.live);
    at("free").textContent = gib(last.free);
  }
  if (model.lowest) at("lowest").textContent = gib(model.lowest.free);
  at("count").textContent = model.records.reduce((most, record) => Math.max(most, record.sequence), 0).toLocaleString("en");
  drawChart();
  drawInstant();
  drawLines();
}

function drawChart() {
  const points = model.points();
  const x = points.map((point) => point && point.time);
  const line = (name, key, tone, extra = {}) => ({
    name, x, y: points.map((point) => point && inMib(point[key])), mode: "lines", connectgaps: false,
    line: { shape: "hv", color: color(tone), width: 1.5 }, ...extra,
  });
  const traces = SEGMENTS.filter((name) => points.some((point) => point && point.segments[name] > 0)).map((name) => ({
    name, x, y: points.map((point) => point && Math.max(point.segments[name] / MIB, 0)), mode: "lines", stackgroup: "tags",
    line: { shape: "hv", width: 0, color: color(name) }, connectgaps: false,
  }));
  traces.push(line("live", "live", "ink"), line("free", "free", "accent", { visible: "legendonly" }));
  if (points.some((point) => point && point.reserved !== null)) traces.push(line("reserved", "reserved", "overhead"));
  const failed = points.filter((point) => point && point.record.kind === "failed");
  traces.push({
    name: "failed", x: failed.map((point) => point.time), y: failed.map((point) => inMib(point.live)), mode: "markers",
    marker: { symbol: "x", size: 12, color: color("bad") },
    text: failed.map((point) => `#${point.record.sequence}: ${mib(point.record.size)} MiB, ${point.record.tag}`),
  });
  const lowest = model.lowest;
  const marks = lowest ? [{
    type: "line", xref: "x", yref: "paper", x0: new Date(lowest.wall_ns / 1e6), x1: new Date(lowest.wall_ns / 1e6), y0: 0, y1: 1,
    line: { color: color("faint"), width: 1, dash: "dot" },
  }] : [];
  const chosen = model.records[at("instant").value];
  if (chosen && !following) marks.push({
    type: "line", xref: "x", yref: "paper", x0: new Date(chosen.wall_ns / 1e6), x1: new Date(chosen.wall_ns / 1e6), y0: 0, y1: 1,
    line: { color: color("accent"), width: 2 },
  });
  const axis = { gridcolor: color("line"), zerolinecolor: color("line") };
  const layout = {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: color("ink") }, shapes: marks,
    margin: { l: 90, r: 10, t: 10, b: 40 }, legend: { orientation: "h", y: -0.15 }, hovermode: "closest",
    xaxis: { ...axis, type: "date" }, yaxis: { ...axis, tickformat: ",~r", ticksuffix: " MiB", rangemode: "tozero" },
    uirevision: "kept",
  };
  Plotly.react("chart", traces, layout, { displayModeBar: false, responsive: true });
  const peak = points.reduce((most, point) => Math.max(most, point ? point.live : 0), 0);
  at("chart").setAttribute("aria-label",
    `Live bytes over time: highest ${gib(peak)}, ${failed.length} failures, lowest free ${lowest ? gib(lowest.free) : "unknown"}`);
}

function drawInstant() {
  const place = Number(at("instant").value);
  const record = model.records[place];
  if (!record) return;
  const live = [...model.liveAt(place).values()].sort((one, other) => other.size - one.size);
  const known = live.reduce((sum, block) => sum + block.size, 0);
  const time = new Date(record.wall_ns / 1e6).toLocaleTimeString("en", { hour12: false });
  const before = Math.max((record.live ?? known) - known, 0);
  at("instant-text").textContent = `${time}, after record ${record.index}: ${mib(known)} MiB in ${live.length} blocks`
    + (before >= MIB ? `, ${mib(before)} MiB from before the trace` : "");
  at("blocks").tBodies[0].replaceChildren(...live.slice(0, 50).map((block) =>
    row([`#${block.sequence}`, mib(block.size), block.tag, block.site])));
}

function drawLines() {
  const kind = at("kind").value;
  const matches = tagMatcher(at("tag").value);
  const least = Number(at("min-size").value || 0) * MIB;
  const rows = [];
  let count = 0;
  for (let i = model.records.length - 1; i >= 0; i--) {
    const record = model.records[i];
    if (record.kind !== "gap") {
      if (kind && record.kind !== kind) continue;
      if (record.kind !== "note" && record.size < least) continue;
      if (!matches(record.tag)) continue;
    }
    count++;
    if (rows.length >= ROWS) continue;
    const said = [record.why && `why=${record.why}`, record.text, record.site, record.requests.length && `for ${record.requests.join(", ")}`];
    rows.push(row([
      record.sequence ? `#${record.sequence}` : "", record.kind, record.kind === "gap" ? `${record.size} records` : mib(record.size),
      record.live === null ? "" : mib(record.live), record.free === null ? "" : mib(record.free), record.tag, said.filter(Boolean).join(" · "),
    ], record.kind));
  }
  at("shown").textContent = count > rows.length ? `${rows.length} of ${count.toLocaleString("en")} shown` : `${count} shown`;
  at("lines").tBodies[0].replaceChildren(...rows);
}

function drawLedger(ledger) {
  const overheads = ["pool_slack", "rounding", "context", "library", "other_processes", "bypass"];
  const entries = [
    ...Object.entries(ledger.segments).map(([name, size]) => [name, size, segmentOf(name)]),
    ...overheads.filter((name) => ledger[name]).map((name) => [name.replaceAll("_", " "), ledger[name], "overhead"]),
    ["residual", ledger.residual, "residual"],
    [ledger.free_is_read ? "free" : "free (estimated)", ledger.free, "free"],
  ];
  at("ledger-moment").textContent = ledger.moment;
  at("ledger-bar").replaceChildren(...entries.filter(([, size]) => size > 0).map(([name, size, tone]) => {
    const part = element("span", undefined, { title: `${name}: ${mib(size)} MiB` });
    part.style.flexGrow = size / ledger.total;
    part.style.background = color(tone);
    return part;
  }));
  at("ledger").tBodies[0].replaceChildren(...entries.map(([name, size, tone]) => {
    const made = element("tr");
    const head = element("th", undefined, { scope: "row" });
    const swatch = element("span", undefined, { class: "swatch" });
    swatch.style.background = color(tone);
    head.append(swatch, name);
    made.append(head, element("td", mib(size)), element("td", size.toLocaleString("en"), { "data-bytes": size, "data-name": name }));
    return made;
  }));
  at("ledger-total-mib").textContent = mib(ledger.total);
  at("ledger-total").textContent = ledger.total.toLocaleString("en");
}

// -- what is asked for -----------------------------------------------------------------------------------------------

async function json(path) {
  const answer = await fetch(base + path);
  return answer.ok ? answer.json() : null;
}

async function refresh() {
  try {
    const health = await fetch(`${root}/health`);
    const told = await health.json();
    at("engine").textContent = health.ok ? told.status : told.error.message.replace(/^the engine is /, "").split(";")[0];
    const { failures } = await json("/failures");
    await showFailures(failures);
    const chosen = at("ledger-choice").value;
    const ledger = chosen ? (await failureRecord(chosen))?.ledger : await json("/ledger");
    if (ledger) drawLedger(ledger);
    else at("ledger-moment").textContent = "not yet: the engine is loading";
  } catch {
    at("engine").textContent = "the server does not answer";
  }
}

async function failureRecord(id) {
  if (!records.has(id)) records.set(id, await json(`/failures/${encodeURIComponent(id)}`));
  return records.get(id);
}

async function showFailures(failures) {
  at("failure").hidden = failures.length === 0;
  if (!failures.length) return;
  const ids = failures.map((failure) => failure.id);
  const choice = at("failure-choice");
  if (choice.options[0]?.value !== ids[0] || choice.options.length !== ids.length) {
    choice.replaceChildren(...failures.map((failure) => element("option", `${failure.time.slice(11, 19)} ${failure.what.slice(0, 90)}`, { value: failure.id })));
    const chosen = at("ledger-choice").value;
    at("ledger-choice").replaceChildren(element("option", "now", { value: "" }),
      ...failures.map((failure) => element("option", `at failure ${failure.time.slice(11, 19)}`, { value: failure.id })));
    at("ledger-choice").value = ids.includes(chosen) ? chosen : "";
    await showFailure(ids[0]);
  }
}

async function showFailure(id) {
  const record = await failureRecord(id);
  if (!record) return;
  at("failure-what").textContent = record.what;
  const allocation = record.allocation ?? {};
  const facts = {
    "Doing": record.doing, "Asked for": allocation.size && `${mib(allocation.size)} MiB`, "For": allocation.tag,
    "By": allocation.site, "Why": allocation.why && [allocation.why, allocation.cause].filter(Boolean).join(": "), "Number": allocation.sequence && `#${allocation.sequence}`,
    "Live": allocation.live && gib(allocation.live), "Free": allocation.free && gib(allocation.free), "Record": record.id,
  };
  at("failure-facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value).map(([name, value]) => {
    const made = element("div");
    made.append(element("dt", name), element("dd", value));
    return made;
  }));
  at("levers-title").hidden = !record.levers.length;
  at("levers").replaceChildren(...record.levers.map((lever) =>
    element("li", `${lever.flag} ${lever.value}: frees ${mib(lever.frees)} MiB${lever.enough ? ", enough" : ""}`)));
  at("requests-title").hidden = !record.requests.length;
  at("failure-requests").replaceChildren(...record.requests.map((request) =>
    element("li", `${request.request_id}: ${request.prompt_tokens} prompt and ${request.output_tokens} output tokens`)));
  at("failure-lines").textContent = record.trace.join("\n");
}

// -- what a person does ----------------------------------------------------------------------------------------------

function follow(on) {
  following = on;
  at("follow").setAttribute("aria-pressed", String(on));
}

at("instant").addEventListener("input", () => {
  follow(false);
  drawInstant();
  drawChart();
});
at("follow").addEventListener("click", () => {
  follow(!following);
  change();
});
at("filters").addEventListener("input", drawLines);
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("failure-choice").addEventListener("change", (event) => showFailure(event.target.value));
at("ledger-choice").addEventListener("change", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  change();
  refresh();
});

connect();
refresh();
setInterval(refresh, 2000);
