"use strict";

// One reading a second; the last SPAN readings are drawn.
const SPAN = 120;
const SIDES = ["prequal", "baseline"];
const CHARTS = [["p99", "p99_ms"], ["p999", "p999_ms"], ["p50", "p50_ms"], ["failed", "failed_now"]];
const COLOURS = { prequal: "#4cc38a", baseline: "#e5944b", line: "#2a3040", dim: "#8b93a7", bad: "#f0616d" };

const windows = { prequal: [], baseline: [] };
let newest = 0;
let state = null;
let catalogue = [];

const at = id => document.getElementById(id);

function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}

function ms(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

async function order(path) {
  at("message").textContent = "";
  try {
    const answer = await fetch(path, { method: "POST", headers: { "x-prequal-demo": "page" } });
    if (!answer.ok) at("message").textContent = (await answer.text()).trim();
  } catch (error) {
    at("message").textContent = "the page's server does not answer";
  }
}

async function poll() {
  try {
    const answer = await fetch(`api/state?since=${newest}`);
    state = await answer.json();
  } catch (error) {
    at("status").textContent = "the page's server does not answer";
    return;
  }
  if (state.second < newest) {
    // The load generator has restarted.
    newest = 0;
    for (const side of SIDES) windows[side] = [];
    return;
  }
  for (const side of SIDES) {
    windows[side].push(...state.sides[side].windows);
    windows[side] = windows[side].slice(-SPAN);
  }
  const last = windows.prequal.at(-1);
  if (last) newest = last.second;
  show();
}

function show() {
  const { sides, rate } = state;
  const load = state.ended ? "the load has ended; `docker-compose restart load` starts it again"
    : `${rate} requests a second through each Envoy`;
  // The generator's own lateness is included in every latency shown.
  const lag = windows.prequal.at(-1)?.lag_p99_ms ?? 0;
  const busy = lag > 5 ? `; this machine is busy: the load generator itself is ${ms(lag)} ms late at p99` : "";
  at("status").textContent = state.second ? load + busy : "waiting for the load generator";
  for (const [id, key] of CHARTS) {
    for (const side of SIDES) {
      const last = windows[side].at(-1);
      const text = !last ? "–" : id === "failed" ? `${last[key]}/s, ${sides[side].failed} in all` : `${ms(last[key])} ms`;
      at(`${id}-${side}`).textContent = text;
    }
    draw(at(`chart-${id}`), key);
  }
  if (state.baseline && document.activeElement !== at("baseline")) at("baseline").value = state.baseline;
  replicas();
  balancer();
  at("active").replaceChildren(...state.active.map(fault => {
    const target = fault.replica ? ` on ${fault.replica}` : "";
    const left = fault.seconds ? `${fault.left} s left` : "";
    return element("li", {}, `${fault.name}${target} `, element("small", {}, `${fault.what}. ${left}`));
  }));
  for (const button of at("faults").children) {
    const fault = catalogue.find(f => f.name === button.dataset.fault);
    const idle = fault.by === "host" && !state.controller;
    button.disabled = idle;
    button.title = idle ? "needs the container engine: keep `cargo xtask compose` running on the host" : fault.what;
  }
}

function replicas() {
  const body = at("replicas").tBodies[0];
  while (body.rows.length < state.replicas.length) {
    const row = body.insertRow();
    for (let cell = 0; cell < 9; cell++) row.insertCell();
    for (const cell of [1, 2, 3, 4, 6, 7]) row.cells[cell].className = "num";
    row.cells[5].className = "share";
    for (const side of SIDES) row.cells[5].append(element("div", { className: `bar ${side}` }));
  }
  const most = Math.max(...state.replicas.flatMap(r => SIDES.map(side => r.share[side])), 0.2);
  state.replicas.forEach((replica, index) => {
    const row = body.rows[index];
    row.className = replica.in_rotation ? "" : "out";
    row.dataset.replica = replica.number;
    row.dataset.share = replica.share.prequal.toFixed(4);
    row.dataset.avoided = replica.avoided;
    row.cells[0].textContent = replica.number;
    row.cells[0].title = replica.address || "";
    row.cells[1].textContent = replica.up ? replica.rif ?? "–" : "–";
    row.cells[2].textContent = replica.up && replica.latency_ms != null ? ms(replica.latency_ms) : "–";
    row.cells[3].textContent = replica.up && replica.base_ms != null ? ms(replica.base_ms) : "–";
    row.cells[4].textContent = replica.up ? replica.knee ?? "–" : "–";
    SIDES.forEach((side, bar) => {
      const share = replica.share[side];
      row.cells[5].children[bar].style.width = `${(100 * share) / most}%`;
      row.cells[5].children[bar].title = `${side}: ${(100 * share).toFixed(1)} %`;
    });
    row.cells[6].textContent = replica.requests_per_s.toFixed(0);
    row.cells[7].textContent = replica.errors_per_s.toFixed(1);
    const tags = replica.faults.map(name => element("span", { className: "tag fault" }, name));
    if (!replica.up) tags.push(element("span", { className: "tag down" }, "agent down"));
    if (replica.avoided) tags.push(element("span", { className: "tag avoided" }, "avoided"));
    if (!replica.in_rotation) tags.push(element("span", { className: "tag ok" }, "out of rotation"));
    if (!tags.length) tags.push(element("span", { className: "tag ok" }, "in use"));
    row.cells[8].replaceChildren(...tags);
  });
}

function balancer() {
  const b = state.balancer;
  const number = (value, digits = 0) => value == null ? "–" : value.toFixed(digits);
  // For a threshold that nothing reaches, the filter writes the maximum of its type.
  const theta = b.theta_rif == null ? "–" : b.theta_rif >= 1e6 ? "∞" : number(b.theta_rif);
  const rows = [
    ["picks/s: cold", number(b.cold_per_s)],
    ["picks/s: hot", number(b.hot_per_s, 1)],
    ["picks/s: trial", number(b.trial_per_s, 1)],
    ["picks/s: fallback", number(b.fallback_per_s, 1)],
    ["θ, RIF", theta],
    ["pool occupancy", number(b.pool_occupancy)],
    ["members known", number(b.members)],
    ["probes per query", number(b.probes_per_query, 2)],
    ["diverted/s", number(b.diverted_per_s, 1)],
  ];
  if (b.ejected != null) rows.push(["ejected by the filter", number(b.ejected)]);
  if (!b.up) rows.push(["Envoy", "does not answer"]);
  at("balancer").replaceChildren(...rows.flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value)]));
}

function draw(canvas, key) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const paint = canvas.getContext("2d");
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  paint.clearRect(0, 0, width, height);
  const left = 38, bottom = height - 4, top = 8;
  const values = SIDES.flatMap(side => windows[side].map(w => w[key]));
  const most = nice(Math.max(...values, key === "failed_now" ? 5 : 10));
  const x = second => left + ((second - (newest - SPAN + 1)) / (SPAN - 1)) * (width - left - 4);
  const y = value => bottom - (value / most) * (bottom - top);
  paint.font = "11px system-ui, sans-serif";
  paint.textAlign = "right";
  paint.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    paint.strokeStyle = COLOURS.line;
    paint.beginPath();
    paint.moveTo(left, y(most * part));
    paint.lineTo(width, y(most * part));
    paint.stroke();
    paint.fillStyle = COLOURS.dim;
    paint.fillText(`${most * part}`, left - 6, y(most * part) + 4);
  }
  paint.setLineDash([3, 3]);
  for (const [second, text] of state.events) {
    if (second <= newest - SPAN) continue;
    paint.strokeStyle = text.endsWith("ends") ? COLOURS.dim : COLOURS.bad;
    paint.beginPath();
    paint.moveTo(x(second), top);
    paint.lineTo(x(second), bottom);
    paint.stroke();
    if (key === "p99_ms" && !text.endsWith("ends")) {
      paint.fillStyle = COLOURS.bad;
      paint.textAlign = x(second) > width - 90 ? "right" : "left";
      paint.fillText(text, x(second) + (x(second) > width - 90 ? -4 : 4), top + 8);
      paint.textAlign = "right";
    }
  }
  paint.setLineDash([]);
  paint.lineWidth = 2;
  paint.lineJoin = "round";
  for (const side of [...SIDES].reverse()) {
    paint.strokeStyle = COLOURS[side];
    paint.beginPath();
    windows[side].forEach((w, index) => index ? paint.lineTo(x(w.second), y(w[key])) : paint.moveTo(x(w.second), y(w[key])));
    paint.stroke();
  }
}

// The smallest of 1, 2, 5 times a power of ten that is not less than `value`.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= value);
}

async function start() {
  catalogue = await (await fetch("api/faults")).json();
  at("faults").replaceChildren(...catalogue.map(fault => {
    const button = element("button", { type: "button", textContent: fault.name });
    button.dataset.fault = fault.name;
    button.onclick = () => {
      const replica = fault.any_replica && at("replica").value ? `&replica=${at("replica").value}` : "";
      const seconds = at("seconds").value ? `&seconds=${encodeURIComponent(at("seconds").value)}` : "";
      order(`api/fault?name=${fault.name}${replica}${seconds}`);
    };
    return button;
  }));
  await poll();
  if (state) {
    at("replica").append(...state.replicas.map(r => element("option", { value: r.number }, r.number)));
  }
  at("baseline").onchange = event => {
    order(`api/baseline?policy=${event.target.value}`);
    event.target.blur();
  };
  setInterval(poll, 1000);
}

start();
