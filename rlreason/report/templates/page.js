// The pictures of a report: drawn by Vega from the page's data when they come near the screen, and all of them acted on
// by the same buttons. Legend, switch, zoom, cursor and values are HTML: reachable by keyboard, and no work for Vega.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const [plots, curves] = [all(".plot"), all(".plot[data-curve]")];
  const colours = new Map(page.settings.map((label, place) => [label, place]));
  const state = { hidden: new Set(), axis: "step", seeds: true, zoom: null, keyboardX: null, changes: 0 };

  // ---- the rows that a figure shows, by data set (as rows_of of documents.py) ----
  const isInZoom = ({ x, y }) => !state.zoom || y === undefined || (x >= state.zoom[0] && x <= state.zoom[1]);
  const isShown = (row) => !state.hidden.has(row.setting) && isInZoom(row);
  function rowsOf({ rows, curves }) {
    const sets = { ...rows, ...(curves.length > 0 && { means: [], seeds: [], marks: [], stops: [] }) };
    curves.forEach(({ setting: place, seed, stopped, x, y, band }, run) => {
      const is_mean = seed === null;
      if (!(state.axis in x) || (!is_mean && !state.seeds)) return;
      const [xs, [low, high], setting] = [x[state.axis], band, page.settings[place]];
      const points = y.map((y, k) => ({ x: xs[k], y, low: low?.[k], high: high?.[k], setting, run }));
      const last = points.length - 1;
      sets[is_mean ? "means" : "seeds"].push(...points);
      if (stopped) sets.stops.push(points[last]);
      const quarters = new Set([last / 4, last / 2, (3 * last) / 4, last].map(Math.floor));
      if (is_mean) sets.marks.push(...[...quarters].map((k) => points[k]));
    });
    return Object.entries(sets).map(([name, some]) => [name, some.filter(isShown)]);
  }
  // A view of a picture, without what the page has itself; `show` gives it the rows, and the y axis the ends of the lines.
  const ends = ["low", "high"].map((name) => ({ name, value: 0 }));
  const scaled = (one) => (one.name === "y" ? { ...one, domain: ends.map(({ name }) => ({ signal: name })) } : one);
  function viewOf({ spec, curves }, more, options, width) {
    const fixed = (one) => (one.name === "width" && width !== undefined ? { name: "width", value: width } : one);
    const signals = [...spec.signals.map(fixed), ...ends];
    const scales = curves.length > 0 ? spec.scales.map(scaled) : spec.scales;
    const parsed = vega.parse({ ...spec, signals, scales, ...more }, null, { ast: true });
    return new vega.View(parsed, { expr: vega.expressionInterpreter, hover: false, ...options });
  }
  function show(view, figure) {
    const sets = rowsOf(figure);
    const ys = sets.flatMap(([name, some]) => (["means", "seeds"].includes(name) ? some.map(({ y }) => y) : []));
    const [low, high] = figure.limits;
    for (const [name, rows] of sets) view.data(name, rows);
    view.signal("low", ys.reduce((a, b) => Math.min(a, Math.max(b, low)), high));
    view.signal("high", ys.reduce((a, b) => Math.max(a, Math.min(b, high)), low));
    return view.signal("xtitle", page.axes[state.axis]);
  }

  // ---- drawing: when a picture is near the screen; a change draws those anew, and the others when they come near ----
  async function draw(plot) {
    if (plot.drawn === state.changes) return;
    plot.drawn = state.changes;
    const figure = page.figures[plot.dataset.figure];
    if (plot.view === undefined) {
      const container = Object.assign(document.createElement("div"), { className: "live", ariaHidden: "true" });
      plot.prepend(container);
      plot.view = viewOf(figure, { title: null, legends: [] }, { renderer: "svg", container });
      if (curves.includes(plot)) listen(plot);
    }
    await show(plot.view, figure).runAsync();
    plot.querySelector(".still")?.remove();
    plot.dataset.ready = "1";
  }
  const onScreen = (entries) => entries.filter((one) => one.isIntersecting).forEach((one) => draw(one.target));
  const observer = new IntersectionObserver(onScreen, { rootMargin: "200px" });
  function change(to) {
    Object.assign(state, to, { changes: state.changes + 1 });
    showCursor(null);
    all(".reset").forEach((button) => (button.hidden = state.zoom === null));
    all("input.axis").forEach((radio) => (radio.checked = radio.value === state.axis));
    all("input.seeds").forEach((box) => (box.checked = state.seeds));
    for (const button of all(".legend button")) button.setAttribute("aria-pressed", !state.hidden.has(labelOf(button)));
    observer.disconnect();
    plots.forEach((plot) => observer.observe(plot)); // which tells at once what is on the screen
  }
  const labelOf = ({ dataset }) => page.settings[dataset.setting];
  const on = (event, selector, to) => all(selector).forEach((one) => (one[event] = () => change(to(one))));
  on("onchange", "input.axis", (radio) => ({ axis: radio.value, zoom: null, keyboardX: null }));
  on("onchange", "input.seeds", (box) => ({ seeds: box.checked }));
  on("onclick", ".reset", () => ({ zoom: null }));
  on("onclick", ".legend button", (button) => {
    const hidden = new Set(state.hidden);
    if (!hidden.delete(labelOf(button))) hidden.add(labelOf(button));
    return { hidden };
  });
  document.getElementById("theme").onclick = () => {
    const { dataset } = document.documentElement;
    const now = dataset.theme ?? (matchMedia("(prefers-color-scheme:dark)").matches ? "dark" : "light");
    dataset.theme = now === "dark" ? "light" : "dark";
  };
  addEventListener("beforeprint", () => all("details").forEach((details) => (details.open = true)));
  addEventListener("beforeprint", () => plots.forEach(draw));

  // ---- a picture to take away: as it is shown, with legend and title, in the colours of a light page ----
  const style = getComputedStyle(document.documentElement);
  const light = (svg) => svg.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).match(/#\w+/)[0]);
  async function svgOf(figure) {
    const shown = (one) => ({ ...one, values: one.values.filter((label) => !state.hidden.has(label)) });
    const more = { background: "#fff", legends: (figure.spec.legends ?? []).map(shown) };
    const view = viewOf(figure, more, { renderer: "none" }, 760);
    return light(await show(view, figure).toSVG());
  }
  async function pngOf(figure) {
    const image = new Image();
    image.src = `data:image/svg+xml,${encodeURIComponent(await svgOf(figure))}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done));
  }
  function csvOf({ rows, curves }) {
    const flat = Object.entries(rows).flatMap(([data, some]) => some.map((row) => ({ data, ...row })));
    for (const { setting, seed, x, y, band } of curves.filter(({ x }) => state.axis in x)) {
      const [data, of, xs] = [seed === null ? "mean" : "run", page.settings[setting], Object.entries(x)];
      const at = (k) => Object.fromEntries(xs.map(([axis, values]) => [axis, values[k]]));
      const row = (value, k) => ({ data, seed, setting: of, ...at(k), value, low: band[0]?.[k], high: band[1]?.[k] });
      flat.push(...y.map(row));
    }
    const names = [...new Set(flat.flatMap(Object.keys))];
    const cell = (value) => (/[",\n]/.test(value ?? "") ? `"${value.replaceAll('"', '""')}"` : (value ?? ""));
    const shown = flat.filter(({ setting }) => !state.hidden.has(setting));
    return [names, ...shown.map((row) => names.map((name) => row[name]))].map((line) => line.map(cell).join()).join("\n");
  }
  const kinds = { svg: [svgOf, "image/svg+xml"], png: [pngOf, "image/png"], csv: [csvOf, "text/csv"] };
  for (const button of all("[data-take]")) {
    button.onclick = async () => {
      const [{ figure, take }, { figures }] = [button.dataset, page];
      const [made, type] = kinds[take];
      const href = URL.createObjectURL(new Blob([await made(figures[figure])], { type }));
      Object.assign(document.createElement("a"), { href, download: `${figure.replace(/\W+/g, "_")}.${take}` }).click();
    };
  }

  // ---- the cursor: by pointer or arrow keys, on all curves at once, with the values as text below each ----
  function lay(plot, name, ends) {
    const element = plot.querySelector(`.${name}`);
    element.hidden = ends === null;
    if (ends === null) return;
    const [left, top] = plot.view.origin();
    const [from, to] = ends.map(plot.view.scale("x")).sort((a, b) => a - b);
    element.style = `left:${left + from}px; width:${to - from}px; top:${top}px; height:${plot.view.height()}px`;
  }
  function span(text, colour) {
    const [element, sample] = [document.createElement("span"), document.createElement("i")];
    sample.style.background = `var(--s${colour})`;
    element.append(...(colour === undefined ? [] : [sample]), text);
    return element;
  }
  function valuesAt(plot, x) {
    const { format } = page.figures[plot.dataset.figure];
    const text = (y) => (format.endsWith("%") ? `${(100 * y).toFixed(1)}%` : String(Number(y.toPrecision(3))));
    return [...colours].flatMap(([label, colour]) => {
      const means = plot.view.data("means").filter((row) => row.setting === label);
      const gap = (row) => Math.abs(row.x - x);
      const best = [...means].sort((a, b) => gap(a) - gap(b))[0];
      if (!best || gap(best) > Math.max(0.1 * (means.at(-1).x - means[0].x), 1e-9)) return [];
      const ends = best.low === null ? "" : ` (${text(best.low)} – ${text(best.high)})`;
      return [span(`${label} ${text(best.y)}${ends}`, colour)];
    });
  }
  function showCursor(x, reader = null) {
    for (const plot of curves.filter((plot) => plot.view !== undefined)) {
      const out = plot.parentElement.querySelector(".readout");
      out.setAttribute("aria-live", plot === reader ? "polite" : "off");
      const at = x === null ? "" : `${page.axes[state.axis].replace(/ \(.*/, "")} ${Number(x.toPrecision(4))}`;
      out.replaceChildren(...(x === null ? [] : [span(at), ...valuesAt(plot, x)]));
      lay(plot, "cursor", x === null ? null : [x, x]);
    }
  }

  // ---- pointer and keys on a curve: drag to zoom, double-click to return ----
  function listen(plot) {
    let [from, to] = [null, null]; // of a drag
    const scale = () => plot.view.scale("x");
    const under = (event) => {
      const pixel = event.clientX - plot.getBoundingClientRect().left - plot.view.origin()[0];
      return pixel < 0 || pixel > plot.view.width() ? null : scale().invert(pixel);
    };
    const endDrag = () => {
      const [zoom, [low, high]] = [[from, to].sort((a, b) => a - b), scale().domain()];
      [from, to] = [null, null];
      lay(plot, "brush", null);
      if (zoom[1] - zoom[0] > 0.03 * (high - low)) change({ zoom });
    };
    plot.onpointermove = (event) => {
      const x = under(event);
      showCursor(x);
      if (from !== null && x !== null) lay(plot, "brush", [from, (to = x)]);
    };
    plot.onpointerleave = () => (from === null ? showCursor(null) : null);
    plot.onpointerdown = (event) => {
      [from, to] = event.pointerType === "touch" ? [null, null] : [under(event), under(event)];
      if (from !== null) plot.setPointerCapture(event.pointerId);
    };
    plot.onpointerup = plot.onpointercancel = endDrag;
    plot.ondblclick = () => change({ zoom: null });
    plot.onkeydown = (event) => {
      if (event.key === "Escape") return showCursor(null);
      const [low, high] = scale().domain();
      const [now, step] = [state.keyboardX ?? high, (high - low) / 50];
      const next = { ArrowLeft: now - step, ArrowRight: now + step, Home: low, End: high }[event.key];
      if (next === undefined) return;
      event.preventDefault(); // scrolling
      state.keyboardX = Math.min(Math.max(next, low), high);
      showCursor(state.keyboardX, plot);
    };
  }
  change({});
})();
