// The pictures of a report: drawn by Vega from the page's data when they come near the screen, and all of them acted on
// by the same buttons. Legend, switch, zoom, cursor and values are HTML: reachable by keyboard, and no work for Vega.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const plots = all(".plot");
  const labels = page.settings.map((setting) => setting.label);
  const isGrey = (place) => page.settings[place].colour === null;

  // What is shown: settings by their place in the legend, the axis, thin lines, and the range of x that is zoomed into.
  const state = { shown: new Set(labels.keys()), axis: "step", seeds: true, zoom: null };
  const views = new Map(); // name of a figure -> its Vega view

  const onAxis = (x) => x / page.axes[state.axis].divide;
  const inZoom = (x) => state.zoom === null || (x >= state.zoom[0] && x <= state.zoom[1]);

  // ---- rows of the data sets ----

  // The bands of the settings that are shown, on the axis that is chosen.
  const bandsOf = (figure) => (figure.bands[state.axis] ?? []).filter((band) => state.shown.has(band.setting));

  // Where a mean has its markers: at its quarters.
  const quarters = (count) => new Set([count >> 2, count >> 1, (3 * count) >> 2, count - 1].filter((k) => k >= 0));

  function addBand(rows, band) {
    const setting = labels[band.setting];
    const points = [];
    band.x.map(onAxis).forEach((x, k) => {
      const [low, high] = [band.low?.[k] ?? null, band.high?.[k] ?? null];
      if (inZoom(x)) points.push({ setting, x, y: band.mean[k], low, high });
    });
    if (isGrey(band.setting)) {
      rows.seeds.push(...points.map((point) => ({ ...point, run: setting })));
      return;
    }
    rows.means.push(...points);
    for (const place of quarters(points.length)) rows.marks.push(points[place]);
  }

  function addLine(rows, line) {
    if (!(state.axis in line.x)) return;
    const setting = labels[line.setting];
    const column = page.columns[line.x[state.axis]];
    const run = `${setting}/${line.seed}`;
    const points = line.y.map((y, k) => ({ setting, run, x: onAxis(column[line.at?.[k] ?? k]), y }));
    const last = points[points.length - 1];
    if (state.seeds) rows.seeds.push(...points.filter((point) => inZoom(point.x)));
    if (line.stopped && inZoom(last.x)) rows.stops.push(last);
  }

  // Data set -> its rows, of what is shown.
  function rowsOf(figure) {
    const shown = new Set([...state.shown].map((place) => labels[place]));
    const rows = {};
    for (const [name, fixed] of Object.entries(figure.rows))
      rows[name] = fixed.filter((row) => row.setting === undefined || shown.has(row.setting));
    if (figure.bands === undefined) return rows;
    Object.assign(rows, { means: [], seeds: [], marks: [], stops: [] });
    bandsOf(figure).forEach((band) => addBand(rows, band));
    figure.lines.filter((line) => state.shown.has(line.setting)).forEach((line) => addLine(rows, line));
    return rows;
  }

  // ---- drawing ----

  async function draw(plot) {
    const name = plot.dataset.figure;
    const figure = page.figures[name];
    let view = views.get(name);
    if (view === undefined) {
      const box = document.createElement("div");
      box.className = "live";
      box.setAttribute("aria-hidden", "true"); // the plot itself has the words
      plot.append(box);
      const options = { expr: vega.expressionInterpreter, renderer: "svg", container: box, hover: false };
      view = new vega.View(vega.parse(figure.spec, null, { ast: true }), options);
      views.set(name, view);
    }
    for (const [set, rows] of Object.entries(rowsOf(figure))) view.data(set, rows);
    view.signal("xtitle", page.axes[state.axis].title);
    await view.runAsync();
    plot.querySelector(".still")?.remove();
    plot.dataset.ready = "1";
  }

  // A picture is drawn when it is near the screen; a change draws those anew, and the others when they come near.
  const waiting = new Set(plots);
  const near = new Set();
  const drawIfWaiting = (plot) => (waiting.delete(plot) ? draw(plot) : null);
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) near.add(entry.target);
        else near.delete(entry.target);
        if (entry.isIntersecting) drawIfWaiting(entry.target);
      }
    },
    { rootMargin: "200px" }
  );
  plots.forEach((plot) => observer.observe(plot));

  async function redraw() {
    showCursor(null);
    plots.forEach((plot) => waiting.add(plot));
    all(".reset").forEach((button) => (button.hidden = state.zoom === null));
    await Promise.all([...near].map(drawIfWaiting));
  }

  function zoomTo(range) {
    state.zoom = range;
    redraw();
  }

  // ---- legend, switch, thin lines, theme ----

  for (const button of all(".legend button"))
    button.onclick = () => {
      const which = button.dataset.setting;
      const show = button.getAttribute("aria-pressed") !== "true";
      const places = which === "rest" ? [...labels.keys()].filter(isGrey) : [Number(which)];
      places.forEach((place) => (show ? state.shown.add(place) : state.shown.delete(place)));
      for (const twin of all(".legend button"))
        if (twin.dataset.setting === which) twin.setAttribute("aria-pressed", String(show));
      redraw();
    };
  for (const radio of all("input.axis"))
    radio.onchange = () => {
      state.axis = radio.value;
      for (const twin of all("input.axis")) twin.checked = twin.value === state.axis;
      keyboardX = null;
      zoomTo(null);
    };
  for (const box of all("input.seeds"))
    box.onchange = () => {
      state.seeds = box.checked;
      for (const twin of all("input.seeds")) twin.checked = state.seeds;
      redraw();
    };
  for (const button of all(".reset")) button.onclick = () => zoomTo(null);
  document.getElementById("theme").onclick = () => {
    const root = document.documentElement;
    const now = root.dataset.theme ?? (matchMedia("(prefers-color-scheme:dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  };

  // ---- the cursor: by pointer or arrow keys, on all curves at once, with the values as text below each ----

  const curves = plots.filter((plot) => "curve" in plot.dataset);
  let keyboardX = null;

  // A layer over a picture, made when it is first needed.
  function layer(plot, name) {
    let found = plot.querySelector(`.${name}`);
    if (found === null) {
      found = document.createElement("i");
      found.className = name;
      plot.append(found);
    }
    return found;
  }

  // Lay it over the part of a picture from one x to another, in pixels of the plot's frame.
  function place(element, view, from, to) {
    const [left, top] = view.origin();
    Object.assign(element.style, { left: `${left + from}px`, top: `${top}px`, height: `${view.height()}px` });
    if (to !== undefined) element.style.width = `${to - from}px`;
  }

  function valueWord(format, value) {
    if (format.endsWith("%")) return `${(100 * value).toFixed(1)}%`;
    const size = Math.abs(value);
    return size >= 100 ? value.toFixed(0) : size >= 0.1 ? value.toFixed(2) : value.toPrecision(2);
  }

  function xWord(x) {
    const name = page.axes[state.axis].title.replace(/ \(.*/, "");
    const word = x >= 1e5 ? `${(x / 1e6).toFixed(2)} M` : x.toFixed(state.axis === "time" ? 1 : 0);
    return `${name} ${word}`;
  }

  // A setting's value at x; null where it has none near.
  function valueAt(band, x, format) {
    let best = 0;
    const gap = (k) => Math.abs(onAxis(band.x[k]) - x);
    for (let k = 1; k < band.x.length; k++) if (gap(k) < gap(best)) best = k;
    const range = onAxis(band.x[band.x.length - 1] - band.x[0]);
    if (gap(best) > Math.max(0.1 * range, 1e-9)) return null;
    const ends = band.low ? ` (${valueWord(format, band.low[best])} – ${valueWord(format, band.high[best])})` : "";
    return `${labels[band.setting]} ${valueWord(format, band.mean[best])}${ends}`;
  }

  function readOut(plot, x, aloud) {
    const figure = page.figures[plot.dataset.figure];
    const out = plot.parentElement.querySelector(".readout");
    const at = document.createElement("span");
    at.textContent = xWord(x);
    out.replaceChildren(at);
    out.setAttribute("aria-live", aloud ? "polite" : "off");
    for (const band of bandsOf(figure).filter((band) => !isGrey(band.setting))) {
      const word = valueAt(band, x, figure.format);
      if (word === null) continue;
      const value = document.createElement("span");
      const sample = document.createElement("i");
      sample.style.background = `var(--s${page.settings[band.setting].colour})`;
      value.append(sample, word);
      out.append(value);
    }
  }

  // Show it at x on every curve, or hide it; `reader`: the curve whose values are read aloud.
  function showCursor(x, reader = null) {
    for (const plot of curves) {
      const view = views.get(plot.dataset.figure);
      if (view === undefined) continue;
      const line = layer(plot, "cursor");
      line.hidden = x === null;
      if (x === null) {
        plot.parentElement.querySelector(".readout").replaceChildren();
        continue;
      }
      place(line, view, view.scale("x")(x));
      readOut(plot, x, plot === reader);
    }
  }

  // ---- pointer and keys on a curve ----

  const LEAST_DRAG = 0.03; // of the axis: less is a click
  const STEPS = 50; // of the arrow keys from one end to the other
  let drag = null;
  let frame = 0;

  // The x under the pointer; null beside the plot's frame.
  function xUnder(plot, event) {
    const view = views.get(plot.dataset.figure);
    if (view === undefined) return null;
    const pixel = event.clientX - plot.querySelector(".live").getBoundingClientRect().left - view.origin()[0];
    return pixel < 0 || pixel > view.width() ? null : view.scale("x").invert(pixel);
  }

  function follow(plot, x) {
    showCursor(x);
    if (drag === null || x === null) return;
    drag.to = x;
    const view = views.get(plot.dataset.figure);
    const [from, to] = [drag.from, drag.to].map(view.scale("x")).sort((a, b) => a - b);
    place(layer(plot, "brush"), view, from, to);
  }

  function endDrag(plot) {
    plot.querySelector(".brush")?.remove();
    if (drag === null) return;
    const range = [drag.from, drag.to].sort((a, b) => a - b);
    const [low, high] = views.get(plot.dataset.figure).scale("x").domain();
    drag = null;
    if (range[1] - range[0] > LEAST_DRAG * (high - low)) zoomTo(range);
  }

  function onKey(plot, event) {
    const view = views.get(plot.dataset.figure);
    if (view === undefined) return;
    if (event.key === "Escape") return showCursor(null);
    const [low, high] = view.scale("x").domain();
    const now = keyboardX ?? high;
    const step = (high - low) / STEPS;
    const next = { ArrowLeft: now - step, ArrowRight: now + step, Home: low, End: high }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    keyboardX = Math.min(Math.max(next, low), high);
    showCursor(keyboardX, plot);
  }

  for (const plot of curves) {
    plot.onpointermove = (event) => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => follow(plot, xUnder(plot, event)));
    };
    plot.onpointerleave = () => (drag === null ? showCursor(null) : null);
    plot.onpointerdown = (event) => {
      const x = xUnder(plot, event);
      if (x === null || event.pointerType === "touch") return;
      drag = { from: x, to: x };
      plot.setPointerCapture(event.pointerId);
    };
    plot.onpointerup = () => endDrag(plot);
    plot.onpointercancel = () => endDrag(plot);
    plot.ondblclick = () => zoomTo(null);
    plot.onkeydown = (event) => onKey(plot, event);
  }

  // ---- paper: everything is opened and drawn ----

  addEventListener("beforeprint", () => {
    all("details").forEach((details) => (details.open = true));
    plots.forEach(drawIfWaiting);
  });
})();
