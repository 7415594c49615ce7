// Draws the curves from the JSON in the page: axes, lines, legend, and values under the pointer.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const line of data.charts.flatMap((chart) => chart.lines)) {
    line.low ??= line.y; // no spread
    line.high ??= line.y;
  }
  const groups = new Map(data.groups.map((group) => [group.index, group]));
  const off = new Set(); // groups that the reader switched off
  const charts = []; // what redraws when the reader chooses something
  let setting = 0;

  // Elements ------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const html = (name, ...content) => fill(document.createElement(name), ...content);
  const svg = (name, ...content) => fill(document.createElementNS(SVG, name), ...content);

  function fill(element, attributes, ...children) {
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children); // strings become text nodes, never markup
    return element;
  }

  function stroke(group, factor = 1) {
    const dash = group.dash.split(" ").map((part) => part * factor).join(" ");
    return {
      fill: "none", stroke: `var(--c${group.index})`, "stroke-width": group.width * factor,
      "stroke-linejoin": "round", ...(group.dash ? { "stroke-dasharray": dash } : {}),
    };
  }

  function swatch(index) {
    return document.querySelector(`tr[data-group="${index}"] .swatch`).cloneNode(true);
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
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - 0.5, high + 0.5];
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

  // Charts --------------------------------------------------------------------------------------

  function visibleLines(chart) {
    const chosen = (group) => groups.get(group).setting === setting && !off.has(group);
    const lines = chart.lines.filter((line) => chosen(line.group));
    // A learning rate that all methods share is one line, not ten on top of each other.
    const means = lines.filter((line) => !line.name);
    const shapes = new Set(means.map((line) => JSON.stringify([line.x, line.y])));
    return means.length > 1 && shapes.size === 1 ? [{ ...means[0], shared: true }] : lines;
  }

  function lookOf(line) {
    if (line.shared) return { fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 };
    const group = groups.get(line.group);
    return line.name ? { ...stroke(group, 0.6), opacity: 0.8 } : stroke(group);
  }

  function nameOf(line) {
    if (line.shared) return "all lines";
    const group = groups.get(line.group);
    return [group.label, group.detail, line.name].filter(Boolean).join(", ");
  }

  function range(lines, from, above) {
    // What diverged must not squeeze the others flat: it leaves the picture at the edge.
    const calm = lines.filter((line) => !line.diverged);
    let low = Infinity, high = -Infinity;
    for (const line of calm.length ? calm : lines) {
      line.x.forEach((x, i) => {
        const known = [line.y[i], line.low[i], line.high[i]].filter((v) => v !== null);
        const shown = x < from ? [] : known.filter((v) => v > above);
        [low, high] = [Math.min(low, ...shown), Math.max(high, ...shown)];
      });
    }
    return low <= high ? [low, high] : [0.1, 1];
  }

  function scales(chart, state, lines, box) {
    const end = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
    const from = state.half ? end / 2 : 0;
    let [low, high] = range(lines, from, state.log ? 0 : -Infinity);
    const space = 0.04 * (high - low);
    if (state.log) [low, high] = range(lines, from, high * 1e-4); // below is mostly round-off
    else [low, high] = [low >= 0 ? Math.max(0, low - space) : low - space, high + space];
    if (chart.unit === "%") high = Math.min(100, high);
    const scale = state.log ? logScale : linearScale;
    const y = scale(low, high, box.bottom, box.top, box.small ? 5 : 6);
    const left = box.left + Math.max(...y.ticks.map(([, label]) => 7 * label.length), 14);
    return { x: linearScale(from, end, left, box.right, box.small ? 7 : 10), y, left };
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
    const { chart, state, picture } = view;
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
    picture.append(svg("text", { x: box.right, y: height - 3, class: "tick unit" }, "epoch"));
    const size = { width: box.right - left + 6, height: box.bottom - box.top + 6 };
    const frame = svg("rect", { x: left, y: box.top - 6, ...size });
    const clip = svg("clipPath", { id: `clip-${chart.name}` }, frame);
    const inside = svg("g", { "clip-path": `url(#clip-${chart.name})` });
    for (const line of lines) {
      const band = { d: bandOf(line, x, y), fill: lookOf(line).stroke, class: "band" };
      if (band.d && !line.name) inside.append(svg("path", band));
    }
    for (const line of lines) inside.append(...strokesOf(line, view));
    view.cross = svg("g", { class: "cross" });
    picture.append(clip, inside, view.cross);
    picture.setAttribute("aria-label", spoken(chart, lines));
  }

  function strokesOf(line, view) {
    const { x, y, state } = view;
    const path = { d: pathOf(line, x, y, state.log), class: "curve", "data-group": line.group };
    const drawn = [svg("path", { ...lookOf(line), ...path })];
    const known = line.y.map((v, i) => i).filter((i) => line.y[i] !== null);
    const last = known[known.length - 1];
    const px = x.at(line.x[last]), py = y.at(Math.min(y.high, Math.max(line.y[last], y.low)));
    const color = lookOf(line).stroke;
    const cross = { d: `M${px - 4} ${py - 4}l8 8m0 -8l-8 8`, stroke: color, class: "diverged" };
    if (line.diverged) drawn.push(svg("path", cross));
    else if (known.length === 1) drawn.push(svg("circle", { cx: px, cy: py, r: 3, fill: color }));
    return drawn;
  }

  function spoken(chart, lines) {
    const ends = lines.map((line) => {
      const known = line.y.filter((v) => v !== null);
      return `${nameOf(line)} ${show(known[known.length - 1], chart.unit)}`;
    });
    return `${chart.title} by epoch. At the end: ${ends.join("; ")}. Arrow keys read values.`;
  }

  function point(view, at) {
    const { chart, x, y, box, cross, readout, lines } = view;
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
      const dot = { cx: x.at(line.x[i]), cy: y.at(value), r: 3.5, fill: lookOf(line).stroke };
      if (inside) cross.append(svg("circle", dot));
    }
    rows.sort((a, b) => b.value - a.value);
    const table = html("table", {}, ...rows.map(({ line, value, low, high }) => {
      const bare = (v) => show(v, chart.unit).replace(" %", "");
      const spread = low !== null && high > low ? `${bare(low)} to ${bare(high)}` : "";
      const mark = line.shared ? "" : swatch(line.group);
      return html("tr", {}, html("th", {}, mark, nameOf(line)),
        html("td", {}, show(value, chart.unit)), html("td", { class: "spread" }, spread));
    }));
    readout.replaceChildren(html("p", {}, `epoch ${+epoch.toPrecision(4)}`), table);
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

  function addChart(chart, place) {
    const title = html("figcaption", {}, html("h3", {}, chart.title), html("p", {}, chart.note));
    if (chart.unit) title.firstChild.append(html("small", {}, ` ${chart.unit}`));
    const picture = svg("svg", { role: "group", tabindex: 0, "aria-label": chart.title });
    const readout = html("div", { class: "readout", "aria-live": "polite", hidden: "" });
    const plot = html("div", { class: "plot" }, picture, readout);
    const buttons = html("div", { class: "toggles" });
    const look = { id: `chart-${chart.name}`, class: "chart" };
    document.getElementById("charts").append(html("figure", look, title, buttons, plot));
    const state = { log: chart.scale === "log", half: false };
    const height = (width) => (place === 0 ? Math.min(340, Math.max(250, width * 0.4)) : 250);
    const view = { chart, state, picture, readout, figure: plot, height, at: 0 };
    const change = (key) => (now) => { state[key] = now; draw(view); };
    if (chart.scale) buttons.append(toggle("log scale", state.log, change("log")));
    if (chart.name !== "lr") buttons.append(toggle("second half", false, change("half")));
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

  // Legend and settings -------------------------------------------------------------------------

  function addLegend() {
    const legend = html("div", { class: "legend", role: "group", "aria-label": "Lines to show" });
    for (const group of data.groups.filter((g) => g.setting === setting)) {
      const button = toggle("", !off.has(group.index), (now) => {
        if (now) off.delete(group.index); else off.add(group.index);
        redraw();
      });
      button.dataset.group = group.index;
      const detail = group.detail ? [html("small", {}, group.detail)] : [];
      button.append(swatch(group.index), html("span", {}, group.label, ...detail));
      legend.append(button);
    }
    document.querySelector(".legend")?.remove();
    document.getElementById("controls").append(legend);
  }

  function addSettings() {
    if (data.settings.length < 2) return;
    const choice = html("fieldset", { class: "settings" }, html("legend", {}, "Setting"));
    data.settings.forEach((label, at) => {
      const radio = html("input", { type: "radio", name: "setting", value: at });
      radio.checked = at === setting;
      radio.addEventListener("change", () => { setting = at; addLegend(); redraw(); });
      choice.append(html("label", {}, radio, html("span", {}, label)));
    });
    document.getElementById("controls").append(choice);
  }

  addSettings();
  addLegend();
  data.charts.forEach(addChart);
  redraw();
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width !== width) redraw();
    width = entry.contentRect.width;
  }).observe(document.getElementById("charts"));
})();
