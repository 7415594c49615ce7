// Draws the page from the JSON in it; while a run is under way, asks for it again and again.
// Strings become text nodes, never markup.
"use strict";
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const off = new Set(); // groups that the reader switched off
  const shown = new Map(); // what each part of the page was drawn from
  let setting = 0;

  // Elements ------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const html = (name, ...content) => fill(document.createElement(name), ...content);
  const svg = (name, ...content) => fill(document.createElementNS(SVG, name), ...content);
  const small = (text) => (text ? [html("small", {}, text)] : []);
  const here = () => data.groups.filter((group) => group.setting === setting);

  function fill(element, attributes, ...children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("--")) element.style.setProperty(key, value);
      else if (value !== null && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  // A part of the page is drawn anew only where what it shows has changed: what the reader holds
  // stays.
  function part(id, values, draw) {
    const text = JSON.stringify(values);
    if (shown.get(id) === text) return;
    shown.set(id, text);
    const place = document.getElementById(id);
    const open = new Set([...place.querySelectorAll("details[open]")].map((d) => d.dataset.key));
    place.replaceChildren(...draw());
    for (const one of place.querySelectorAll("details")) {
      if (open.has(one.dataset.key)) one.open = true;
    }
  }

  function hide(id, hidden) {
    document.getElementById(`${id}-title`).parentElement.hidden = Boolean(hidden);
  }

  function section(id, title, ...content) {
    return html("section", { "aria-labelledby": `${id}-title` },
      html("h2", { id: `${id}-title` }, title), ...content);
  }

  function tone(group) {
    return { class: "tone", "--c": group.color };
  }

  function stroke(group, factor = 1) {
    const dash = group.dash.split(" ").map((length) => length * factor).join(" ");
    return { ...tone(group), "stroke-width": group.width * factor,
      ...(group.dash ? { "stroke-dasharray": dash } : {}) };
  }

  function swatch(group) {
    const line = svg("line", { x1: 0, y1: 5, x2: 28, y2: 5, ...stroke(group) });
    return svg("svg", { class: "swatch", width: 28, height: 10, "aria-hidden": "true" }, line);
  }

  function named(group) {
    return [swatch(group), html("span", {}, group.label, ...small(group.detail))];
  }

  function toggle(label, pressed, change) {
    const button = html("button", { type: "button", class: "toggle", "aria-pressed": pressed });
    button.append(label);
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", now);
      change(now);
    });
    return button;
  }

  // Header and table ----------------------------------------------------------------------------

  const numbers = (rows) => html("dl", { class: "numbers" }, ...rows.map(([what, value, more]) =>
    html("div", {}, html("dt", {}, what), html("dd", {}, value),
      ...(more ? [html("dd", {}, html("small", {}, more))] : []))));

  function header() {
    const live = [html("span", { class: "live" }, "live"), html("span", { class: "late" },
      "no answer; these are the last values")];
    return [html("p", { class: "kicker" }, data.live ? "decentlam " : "decentlam report",
      ...(data.live ? live : [])), html("h1", {}, data.title),
      html("p", { class: "lead" }, data.lead)];
  }

  function results() {
    const heads = [["method", ""], ...data.columns, ["status", ""]];
    const table = html("table", { class: "results" },
      html("thead", {}, html("tr", {}, ...heads.map(([head, unit]) =>
        html("th", { scope: "col" }, head, ...small(unit && ` ${unit}`))))),
      html("tbody", {}, ...here().map((group) => html("tr", { "data-group": group.index },
        html("th", { scope: "row" }, html("div", { title: `seeds ${group.seeds}` }, ...named(group))),
        ...group.cells.map(([text, below]) => html("td", {}, text, ...small(below))),
        html("td", { class: group.bad ? "status bad" : "status" }, group.status)))));
    const frame = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results" };
    return [html("div", frame, table),
      html("p", { class: "small" }, "On the test data at the end of training, ± standard deviation "
        + "between seeds. Averaged model: the parameters of all nodes averaged. Node mean: every "
        + "node’s own model, from the worst node to the best below it. Consensus distance: the "
        + "root mean square distance of the nodes from their average. Wait: the share of a step "
        + "spent waiting for other nodes."),
      ...(data.notes.length ? [html("ul", { class: "odd", "aria-label": "Notes" },
        ...data.notes.map((note) => html("li", {}, note)))] : [])];
  }

  // The nodes, now -----------------------------------------------------------------------------

  // Late is orange, lost is struck out; what is usual is plain.
  function looks(row) {
    const late = Math.max(0, Math.min(1, row.late / 0.5));
    return { class: row.state, "--late": `${Math.round(100 * late)}%`,
      title: `${row.name}, ${row.state}, step ${row.step}, ${percent(row.late)} of the median` };
  }

  const percent = (late) => `${late < 0 ? "−" : "+"}${Math.abs(Math.round(100 * late))} %`;

  function state() {
    const now = data.now, rows = new Map(now.nodes.map((row) => [row.member, row]));
    const of = (at) => rows.get(now.members[at]);
    const name = (at) => (of(at).state === "lost" ? "×" : of(at).name.replace(/^\D+/, ""));
    const label = `${now.nodes.length} nodes. ${now.caption}`;
    const picture = graph(now.places, now.edges, label, (at) => looks(of(at)), name);
    const few = now.nodes.length > 16;
    const listed = few ? now.nodes.filter((row) => row.state !== "ok").slice(0, 8)
      .concat(now.nodes.filter((row) => row.state === "ok").slice(0, 8)) : now.nodes;
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const alive = listed.filter((row) => row.state !== "lost");
    const longest = Math.max(...alive.map((row) => sum(row.split)), 1e-9);
    const words = (row) => now.parts.map((part, at) =>
      `${part} ${share(row.split[at] / (sum(row.split) || 1))}`);
    const mark = (row) => (row.state === "lost" || row.state === "joined" ? [row.state] : [])
      .concat(row.state !== "lost" && row.late > 0.1 ? [`${percent(row.late)} late`] : []);
    const bars = listed.flatMap((row) => [
      html("div", { class: `name ${row.state}` },
        html("span", {}, html("span", { class: "who" }, row.name),
          ...small(mark(row).join(", ")))),
      row.state === "lost" ? html("div", { class: "bar" }) : bar(row.split, longest, words(row)),
      html("div", { class: "whole" }, row.state === "lost" ? "" : row.whole,
        ...small(`step ${row.step.toLocaleString("en")}`)),
    ]);
    const rest = now.nodes.length - listed.length;
    const late = now.nodes.some((row) => row.late > 0.1) ? " Orange nodes are late." : "";
    return [numbers(now.numbers),
      ...(now.warnings.length ? [html("ul", { class: "odd", "aria-label": "Warnings" },
        ...now.warnings.map((text) => html("li", {}, text)))] : []),
      html("div", { class: "state" },
        html("figure", { class: "network" }, picture, html("figcaption", {}, now.caption + late)),
        html("div", {}, legend_of(now.parts, listed.map((row) => row.split), longest),
          html("div", { class: "bars" }, ...bars),
          ...(rest > 0 ? [html("p", { class: "small" },
            `The first of ${now.nodes.length} nodes; ${rest} others are not listed.`)] : [])))];
  }

  // The parts of a step, a graph, how to repeat a run --------------------------------------------

  const share = (value) => `${Math.round(100 * value)} %`;

  function bar(split, longest, words) {
    const pieces = split.map((value, at) => html("span",
      { class: `part${at}`, "--w": `${(100 * value) / longest}%`, title: words[at] }));
    return html("div", { class: "bar", role: "img", "aria-label": words.join(", ") },
      ...pieces.filter((_, at) => split[at] > 0));
  }

  function legend_of(names, splits, longest) {
    const used = names.map((_, at) => splits.some((split) => split[at] > 1e-3 * longest));
    return html("ul", { class: "parts" }, ...names.map((name, at) =>
      html("li", {}, html("span", { class: `key part${at}` }), name)).filter((_, at) => used[at]));
  }

  // A graph: nodes at places, edges between them; `look` and `name` say more about a node.
  function graph(places, edges, label, look, name) {
    const n = places.length, xs = places.map((p) => p[0]), ys = places.map((p) => p[1]);
    const span = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys));
    const r = n > 1 ? Math.min(0.17 * Math.max(1, span / 3.2), (1.1 * span) / n) : 0.17;
    const [left, top] = [Math.min(...xs) - 1.7 * r, Math.min(...ys) - 1.7 * r];
    const size = [Math.max(...xs) + 1.7 * r - left, Math.max(...ys) + 1.7 * r - top];
    const lines = edges.map(([a, b]) => svg("path", { d: `M${places[a].join(" ")}L${places[b].join(" ")}` }));
    const nodes = places.map(([x, y], node) => {
      const { title, ...more } = look(node);
      const dot = svg("circle", { cx: x, cy: y, r, ...more });
      dot.append(svg("title", {}, title));
      const text = { x, y: y + 0.36 * r, "font-size": r * (node < 10 ? 1 : 0.9) };
      return n > 32 ? [dot] : [dot, svg("text", text, name(node))];
    });
    const frame = { role: "img", "aria-label": label, viewBox: `${left} ${top} ${size.join(" ")}`,
      "--s": `${span / (n > 32 ? 400 : 160)}px` };
    return svg("svg", frame, ...lines, ...nodes.flat());
  }

  function repeat() {
    const pairs = (title, facts) => html("div", {}, html("h3", {}, title),
      html("table", { class: "pairs" }, html("tbody", {}, ...Object.entries(facts).map(
        ([key, value]) => html("tr", {}, html("th", { scope: "row" }, key),
          html("td", {}, String(value)))))));
    const blocks = here().map((group) => html("details",
      { "data-key": group.index, ...(data.groups.length === 1 ? { open: "" } : {}) },
      html("summary", {}, ...named(group)), ...group.runs.map((run) => html("div", { class: "run" },
        html("p", {}, run.words), ...(run.command ? [html("pre", { tabindex: 0 }, html("code", {}, run.command))] : [])))));
    return [...blocks, html("div", { class: "facts" },
      ...Object.entries(data.facts).map(([title, facts]) => pairs(title, facts)))];
  }

  // Numbers -------------------------------------------------------------------------------------

  function show(value, unit) {
    if (unit === "%") return value.toFixed(2) + " %";
    const size = Math.abs(value), far = size && (size < 1e-4 || size >= 1e6);
    return far ? value.toExponential(2) : String(+value.toPrecision(4));
  }

  function niceStep(span, count) {
    const power = 10 ** Math.floor(Math.log10(span / count));
    return [1, 2, 5, 10].map((m) => m * power).find((step) => span / step <= count);
  }

  function linearScale(low, high, from, to, count) {
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const step = niceStep(high - low, count);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
      ticks.push([i * step, (i * step).toFixed(digits)]);
    }
    return { ticks, low, high, at: (v) => from + ((v - low) / (high - low)) * (to - from) };
  }

  function logScale(low, high, from, to, count) {
    let [first, last] = [Math.log10(low), Math.log10(high)];
    if (last - first < 0.3) [first, last] = [first - 0.2, last + 0.2];
    const every = Math.ceil((last - first) / count);
    const ticks = [];
    for (let power = Math.floor(first); power <= last; power++) {
      for (const m of last - first < 2 ? [1, 2, 5] : [1]) {
        const place = power + Math.log10(m);
        if (place < first || place > last || power % every) continue;
        const short = String(+(m * 10 ** power).toPrecision(1));
        ticks.push([m * 10 ** power, Math.abs(power) > 3 ? tenTo(power, m) : short]);
      }
    }
    const at = (v) => from + ((Math.log10(v) - first) / (last - first)) * (to - from);
    if (ticks.length < 2) ticks.splice(0, 1, ...linearScale(10 ** first, 10 ** last, from, to, count).ticks);
    return { ticks, low: 10 ** first, high: 10 ** last, at };
  }

  function tenTo(power, m) {
    const raised = [...String(power)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
    return (m > 1 ? `${m}·` : "") + "10" + raised.join("");
  }

  function nearest(values, x) {
    let best = 0;
    values.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(values[best] - x)) best = i; });
    return best;
  }

  const groupOf = (index) => data.groups.find((group) => group.index === index);
  const charts = []; // what redraws when the reader chooses something

  // Charts --------------------------------------------------------------------------------------

  function visibleLines(chart) {
    const chosen = (index) => groupOf(index).setting === setting && !off.has(index);
    const lines = chart.lines.filter((line) => chosen(line.group)).map(
      (line) => ({ low: line.y, high: line.y, ...line })); // without a spread, unless it has one
    // A learning rate that all methods share is one line, not ten on top of each other.
    const means = lines.filter((line) => !line.name);
    const shapes = new Set(means.map((line) => JSON.stringify([line.x, line.y])));
    return means.length > 1 && shapes.size === 1 ? [{ ...means[0], shared: true }] : lines;
  }

  function lookOf(line) {
    if (line.shared) return { class: "ink", "stroke-width": 1.5 };
    const group = groupOf(line.group);
    return line.name ? { ...stroke(group, 0.6), opacity: 0.8 } : stroke(group);
  }

  function nameOf(line) {
    if (line.shared) return "all lines";
    const group = groupOf(line.group);
    return [group.label, group.detail, line.name].filter(Boolean).join(", ");
  }

  function range(lines, above) {
    // What diverged must not squeeze the others flat: it leaves the picture at the edge.
    const calm = lines.filter((line) => !line.diverged);
    let low = Infinity, high = -Infinity;
    for (const line of calm.length ? calm : lines) {
      line.x.forEach((x, i) => {
        const known = [line.y[i], line.low[i], line.high[i]];
        const shown = known.filter((v) => v !== null && v > above);
        [low, high] = [Math.min(low, ...shown), Math.max(high, ...shown)];
      });
    }
    return low <= high ? [low, high] : [0.1, 1];
  }

  function scales(chart, state, lines, box) {
    const end = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
    let [low, high] = range(lines, state.log ? 0 : -Infinity);
    const space = 0.04 * (high - low);
    if (state.log) [low, high] = range(lines, high * 1e-4); // below is mostly round-off
    else [low, high] = [low >= 0 ? Math.max(0, low - space) : low - space, high + space];
    if (chart.unit === "%") high = Math.min(100, high);
    const scale = state.log ? logScale : linearScale;
    const y = scale(low, high, box.bottom, box.top, box.small ? 5 : 6);
    const left = box.left + Math.max(...y.ticks.map(([, label]) => 7 * label.length), 14);
    return { x: linearScale(0, end, left, box.right, box.small ? 7 : 10), y, left };
  }

  function pathOf(line, x, y, log) {
    let text = "", pen = "M";
    line.y.forEach((value, i) => {
      if (value === null || (log && value <= 0)) { pen = "M"; return; }
      text += `${pen}${x.at(line.x[i]).toFixed(1)} ${y.at(value).toFixed(1)}`;
      pen = "L";
    });
    return text;
  }

  function bandOf(line, x, y) {
    const known = (i) => line.low[i] !== null && line.high[i] !== null && line.high[i] >= y.low;
    const there = line.x.map((_, i) => i).filter(known);
    if (!there.some((i) => line.high[i] > line.low[i])) return "";
    const point = (i, v) => `${x.at(line.x[i]).toFixed(1)} ${y.at(Math.max(v, y.low)).toFixed(1)}`;
    const above = there.map((i) => point(i, line.high[i]));
    const below = there.map((i) => point(i, line.low[i])).reverse();
    return `M${[...above, ...below].join("L")}Z`;
  }

  function draw(view) {
    const { state, picture } = view;
    const chart = data.charts.find((one) => one.name === view.name) ?? { lines: [] };
    const width = Math.max(260, view.figure.clientWidth), height = view.height(width);
    const box = { left: 8, right: width - 10, top: 10, bottom: height - 34, small: width < 560 };
    const lines = (view.lines = visibleLines(chart));
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren();
    leave(view);
    if (!lines.length) {
      view.x = null;
      const middle = { x: width / 2, y: height / 2, class: "none" };
      return picture.append(svg("text", middle, "nothing to draw"));
    }
    const { x, y, left } = scales(chart, state, lines, box);
    Object.assign(view, { x, y, box });
    const stops = new Set(lines.flatMap((line) => line.x).filter((v) => v >= x.low));
    view.stops = [...stops].sort((a, b) => a - b);
    for (const [value, label] of y.ticks) {
      picture.append(svg("path", { d: `M${left} ${y.at(value)}H${box.right}`, class: "grid" }));
      picture.append(svg("text", { x: left - 8, y: y.at(value) + 4, class: "tick y" }, label));
    }
    for (const [value, label] of x.ticks) {
      picture.append(svg("text", { x: x.at(value), y: box.bottom + 18, class: "tick x" }, label));
    }
    picture.append(svg("path", { d: `M${left} ${box.bottom}H${box.right}`, class: "axis" }));
    picture.append(svg("text", { x: box.right, y: height - 3, class: "tick unit" }, data.axis));
    const size = { width: box.right - left + 6, height: box.bottom - box.top + 6 };
    const frame = svg("rect", { x: left, y: box.top - 6, ...size });
    const clip = svg("clipPath", { id: `clip-${chart.name}` }, frame);
    const inside = svg("g", { "clip-path": `url(#clip-${chart.name})` });
    for (const line of lines) {
      const { "--c": color } = lookOf(line);
      const band = { d: bandOf(line, x, y), "--c": color, class: "band tone" };
      if (band.d && !line.name) inside.append(svg("path", band));
    }
    for (const line of lines) inside.append(...strokesOf(line, view));
    view.cross = svg("g", { class: "cross" });
    picture.append(clip, inside, view.cross);
    picture.setAttribute("aria-label", spoken(chart, lines));
  }

  function strokesOf(line, view) {
    const { x, y, state } = view;
    const look = lookOf(line), filled = { class: `dot ${look.class}`, "--c": look["--c"] };
    const path = { d: pathOf(line, x, y, state.log), "data-group": line.group };
    const drawn = [svg("path", { ...look, ...path, class: `curve ${look.class}` })];
    const known = line.y.map((v, i) => i).filter((i) => line.y[i] !== null);
    const last = known[known.length - 1];
    const px = x.at(line.x[last]), py = y.at(Math.min(y.high, Math.max(line.y[last], y.low)));
    const cross = { ...look, d: `M${px - 4} ${py - 4}l8 8m0 -8l-8 8`, class: "diverged tone" };
    if (line.diverged) drawn.push(svg("path", cross));
    else if (known.length === 1) drawn.push(svg("circle", { cx: px, cy: py, r: 3, ...filled }));
    return drawn;
  }

  function spoken(chart, lines) {
    const ends = lines.map((line) => {
      const known = line.y.filter((v) => v !== null);
      return `${nameOf(line)} ${show(known[known.length - 1], chart.unit)}`;
    });
    return `${chart.title} by ${data.axis}. At the end: ${ends.join("; ")}. Arrow keys read values.`;
  }

  function point(view, at) {
    const { unit, x, y, box, cross, readout, lines } = view;
    if (!x || !view.stops.length) return;
    view.at = Math.max(0, Math.min(view.stops.length - 1, at));
    const epoch = view.stops[view.at], px = x.at(epoch);
    cross.replaceChildren(svg("line", { x1: px, x2: px, y1: box.top, y2: box.bottom }));
    const rows = [];
    for (const line of lines) {
      const i = nearest(line.x, epoch), value = line.y[i];
      const gap = Math.abs(line.x[i] - epoch), pace = (x.high - x.low) / Math.max(1, line.x.length);
      if (value === null || gap > pace) continue;
      rows.push({ line, value, low: line.low[i], high: line.high[i] });
      const inside = !(view.state.log && value <= 0) && value >= y.low && value <= y.high;
      const look = lookOf(line), filled = { class: `dot ${look.class}`, "--c": look["--c"] };
      const dot = { cx: x.at(line.x[i]), cy: y.at(value), r: 3.5, ...filled };
      if (inside) cross.append(svg("circle", dot));
    }
    rows.sort((a, b) => b.value - a.value);
    const table = html("table", {}, ...rows.map(({ line, value, low, high }) => {
      const bare = (v) => show(v, unit).replace(" %", "");
      const spread = low !== null && high > low ? `${bare(low)} to ${bare(high)}` : "";
      const mark = line.shared ? "" : swatch(groupOf(line.group));
      return html("tr", {}, html("th", {}, mark, nameOf(line)),
        html("td", {}, show(value, unit)), html("td", { class: "spread" }, spread));
    }));
    readout.replaceChildren(html("p", {}, `${data.axis} ${+epoch.toPrecision(6)}`), table);
    readout.hidden = false;
    const scale = view.figure.clientWidth / (box.right + 10);
    const room = view.figure.clientWidth - readout.offsetWidth;
    const right = px * scale > view.figure.clientWidth / 2;
    const left = px * scale + (right ? -14 - readout.offsetWidth : 14);
    readout.style.left = `${Math.max(0, Math.min(room, left))}px`;
  }

  function leave(view) {
    view.readout.hidden = true;
    view.cross?.replaceChildren();
  }

  function addChart(chart, place) {
    const title = html("figcaption", {}, html("h3", {}, chart.title), html("p", {}, chart.note));
    if (chart.unit) title.firstChild.append(html("small", {}, ` ${chart.unit}`));
    const picture = svg("svg", { role: "group", tabindex: 0, "aria-label": chart.title });
    const readout = html("div", { class: "readout", "aria-live": "polite", hidden: "" });
    const plot = html("div", { class: "plot" }, picture, readout);
    const buttons = html("div", { class: "toggles" });
    const look = { id: `chart-${chart.name}`, class: "chart" };
    document.getElementById("charts").append(html("figure", look, title, buttons, plot));
    const state = { log: chart.scale === "log" };
    const height = (width) => (place === 0 ? Math.min(340, Math.max(250, width * 0.4)) : 250);
    const view = { name: chart.name, unit: chart.unit, state, picture, readout, figure: plot, height, at: 0 };
    const change = (now) => { state.log = now; draw(view); };
    if (chart.scale) buttons.append(toggle("log scale", state.log, change));
    const follow = (event) => {
      if (!view.x) return;
      const frame = picture.getBoundingClientRect();
      const px = ((event.clientX - frame.left) / frame.width) * (view.box.right + 10);
      point(view, nearest(view.stops.map(view.x.at), px));
    };
    picture.addEventListener("pointermove", follow);
    picture.addEventListener("pointerdown", follow);
    picture.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") leave(view); // a finger must be lifted to read
    });
    picture.addEventListener("blur", () => leave(view));
    picture.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: view.at - 1, ArrowRight: view.at + 1, Home: 0, End: Infinity };
      if (event.key === "Escape") leave(view);
      if (!(event.key in moves)) return;
      event.preventDefault();
      point(view, view.readout.hidden && event.key === "ArrowRight" ? view.at : moves[event.key]);
    });
    charts.push(view);
  }

  const redraw = () => charts.forEach(draw);

  function legend() {
    const choice = data.settings.length < 2 ? [] : [html("fieldset", { class: "settings" },
      html("legend", {}, "Setting"), ...data.settings.map((label, at) => {
        const radio = html("input", { type: "radio", name: "setting", value: at });
        radio.checked = at === setting;
        radio.addEventListener("change", () => { setting = at; shown.clear(); draw_all(); });
        return html("label", {}, radio, html("span", {}, label));
      }))];
    const buttons = here().map((group) => {
      const button = toggle("", !off.has(group.index), (now) => {
        if (now) off.delete(group.index); else off.add(group.index);
        redraw();
      });
      button.dataset.group = group.index;
      button.append(...named(group));
      return button;
    });
    const frame = { class: "legend", role: "group", "aria-label": "Lines to show" };
    return [...choice, html("div", frame, ...buttons)];
  }

  // The whole page ------------------------------------------------------------------------------

  function draw_all() {
    document.title = data.title;
    hide("state", !data.now);
    hide("results", data.scripted);
    hide("repeat", !data.groups.length);
    for (const chart of data.charts.filter((one) => one.lines.length)) {
      if (!document.getElementById(`chart-${chart.name}`)) addChart(chart, charts.length);
    }
    hide("curves", !charts.length);
    part("header", [data.title, data.lead, data.live], header);
    if (data.now) part("state", data.now, state);
    part("results", [here(), data.notes, data.columns], results);
    part("controls", [here().map((group) => group.label + group.detail), data.settings], legend);
    part("repeat", [here().map(({ runs }) => runs), data.facts], repeat);
    redraw();
  }

  document.querySelector("main").replaceChildren(
    html("header", { id: "header" }),
    section("state", data.live ? "Now" : "Nodes", html("div", { id: "state" })),
    section("results", "Results", html("div", { id: "results" })),
    section("curves", "Curves", html("div", { id: "controls" }), html("div", { id: "charts" }),
      html("p", { class: "small" }, "Point at a chart, or move along it with the arrow keys, to "
        + "read its values. Lines are means over seeds; bands reach from the lowest to the "
        + "highest. A run that diverged is drawn by itself, thin, up to its ×. A log scale leaves "
        + "out what is below a ten-thousandth of its highest value.")),
    section("repeat", "Repeat it", html("div", { id: "repeat" })));
  draw_all();
  // While the run is under way, its server has newer values.
  async function follow() {
    try {
      const answer = await fetch("values", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      data = await answer.json();
      document.body.classList.remove("stale");
      draw_all();
    } catch {
      document.body.classList.add("stale"); // the server has ended; what it said last stays
    }
    if (data.live) setTimeout(follow, 1000 * data.live);
  }
  if (data.live) setTimeout(follow, 1000 * data.live);

  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
  });
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width !== width) redraw();
    width = entry.contentRect.width;
  }).observe(document.getElementById("charts"));
})();
