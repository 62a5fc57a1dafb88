// vite 8 makes an object of react-window, which the Table needs as it is: stay on 7
export default {
  define: { 'process.env.NODE_ENV': '"production"', 'process.env.JEST_WORKER_ID': 'undefined' },
  build: { chunkSizeWarningLimit: 1e6, minify: false, commonjsOptions: { transformMixedEsModules: true } },
  logLevel: 'warn',
};
